# The initramfs: the agent as /init, the kernel's modules, and the one device node that the kernel opens before /init.

# Sets agent: the static binary. Built with the machine's linker but no library of the machine.
build_agent() {
    local target=x86_64-unknown-linux-musl log
    if ! rustup_has_target "$target"; then
        say "the Rust target $target is not installed (rustup target add $target): linking glibc statically instead"
        target=x86_64-unknown-linux-gnu
        export RUSTFLAGS="${RUSTFLAGS:-} -C target-feature=+crt-static"
    fi
    log=$(cd "$repo" && cargo build --quiet --locked -p kibo-guest-agent --profile guest --target "$target" 2>&1) ||
        { printf '%s\n' "$log" >&2; die "the guest agent does not build, see above"; }
    agent=${CARGO_TARGET_DIR:-$repo/target}/$target/guest/kibo-guest-agent
}

rustup_has_target() {
    [[ -d $(rustc --print sysroot)/lib/rustlib/$1/lib ]]
}

# Sets initramfs_part: a directory with initrd.lz4.
build_initramfs() {
    initramfs_part=$cache/parts/initramfs-$({ cat "$agent" "$here/initramfs.sh"; echo "${kernel_part##*/}"; } | digest)
    [[ -d $initramfs_part ]] && return
    say "initramfs"
    begin initramfs
    local root=$building/root
    install -D -m 0755 "$agent" "$root/init"
    cp -r "$kernel_part/modules" "$root/modules"
    mkdir "$root"/{dev,proc,sys,mnt}
    # Without a console there, /init starts with no standard output at all.
    mknod -m 0600 "$root/dev/console" c 5 1
    find "$root" -exec touch -h -d @0 {} +
    # The kernel reads the legacy format of lz4 only.
    (cd "$root" && find . | LC_ALL=C sort | cpio --quiet --reproducible -R 0:0 -H newc -o) |
        lz4 -l -9 -q >"$building/initrd.lz4"
    rm -rf "$root"
    publish "$initramfs_part"
}
