# The guest's kernel: Debian's cloud kernel, unpacked to the ELF file that QEMU starts without a boot loader (PVH), and
# the modules that a guest can need.

# In the order in which they must be loaded. Those of "configure" wait for the configure message: a guest that was saved
# before it knows no disk yet, and finds the right ones after it was restored.
modules_at_boot=(
    drivers/virtio/virtio_ring drivers/virtio/virtio drivers/virtio/virtio_mmio drivers/char/virtio_console
    lib/libcrc32c fs/erofs/erofs fs/squashfs/squashfs fs/overlayfs/overlay
    drivers/virtio/virtio_balloon net/core/failover drivers/net/net_failover drivers/net/virtio_net
    drivers/misc/pvpanic/pvpanic drivers/misc/pvpanic/pvpanic-mmio
)
modules_at_configure=(drivers/block/virtio_blk)

# Sets kernel_part: a directory with vmlinux, version, and modules/ with their order.
build_kernel() {
    kernel_part=$cache/parts/kernel-$({ echo "$kernel_package $kernel_version"; cat "$here/kernel.sh"; } | digest)
    [[ -d $kernel_part ]] && return
    say "kernel $kernel_package $kernel_version"
    begin kernel
    local work=$building/work
    mkdir "$work" "$building/modules"
    (cd "$work" && apt-get download -q -o APT::Sandbox::User=root "$kernel_package=$kernel_version" >&2 && dpkg-deb -x ./*.deb root) ||
        die "cannot download $kernel_package $kernel_version: run apt-get update"
    unpack_vmlinux "$work"/root/boot/vmlinuz-* "$building/vmlinux"
    copy_modules "$work"/root/lib/modules/*/kernel
    printf '%s %s\n' "$kernel_package" "$kernel_version" >"$building/version"
    rm -rf "$work"
    publish "$kernel_part"
}

# A bzImage carries its kernel compressed; the header (Documentation/arch/x86/boot.rst) says where. The last four bytes
# are the unpacked size, which lz4 does not know of.
unpack_vmlinux() {
    local image=$1 out=$2 setup offset length
    setup=$(header_field "$image" 0x1f1 1)
    offset=$(((setup + 1) * 512 + $(header_field "$image" 0x248 4)))
    length=$(($(header_field "$image" 0x24c 4) - 4))
    # lz4 says nothing useful about the end of its input; the check is the ELF header.
    tail -c +$((offset + 1)) "$image" | head -c "$length" | lz4 -dc >"$out" 2>/dev/null || true
    [[ $(head -c 4 "$out") == $'\x7fELF' ]] || die "$image has no kernel packed with lz4: its packing has changed"
}

header_field() {
    od -A n -t "u$3" -j $(($2)) -N "$3" "$1" | tr -d ' '
}

copy_modules() {
    local from=$1 module
    for module in "${modules_at_boot[@]}" "${modules_at_configure[@]}"; do
        cp "$from/$module.ko" "$building/modules/" || die "$kernel_package has no module $module"
    done
    {
        printf 'boot %s.ko\n' "${modules_at_boot[@]##*/}"
        printf 'configure %s.ko\n' "${modules_at_configure[@]##*/}"
    } >"$building/modules/order"
}
