# The root image of the Template "debian-12": a minimal Debian as a read-only erofs file.

# Sets image_part: a directory with debian-12.erofs and packages.
build_root_image() {
    image_part=$cache/parts/debian-12-$({ echo "$image_versions"; cat "$here/root-image.sh"; } | digest)
    [[ -d $image_part ]] && return
    ((EUID == 0)) || die "the root image is built as root (its files belong to root)"
    say "root image debian-12 (about a minute)"
    begin debian-12
    local root=$building/root
    # Everything in the image is as old as the suite's oldest possible file: two builds of the same packages are the
    # same bytes, and a guest needs no writable copy of a file to fix its time.
    export SOURCE_DATE_EPOCH=1
    # In a mount namespace of its own: whatever ends it early, no mount of /proc or /dev stays behind in the tree.
    debian_sources | unshare --mount mmdebstrap --quiet --variant=minbase --mode=root --format=directory \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-include=/usr/share/doc/*/copyright' --dpkgopt='path-exclude=/usr/share/locale/*' \
        "$suite" "$root" - >&2 || die "mmdebstrap failed, see above"
    chroot "$root" dpkg-query -W -f '${Package} ${Version}\n' >"$building/packages"
    # apt makes these its own when it gets to it, sometimes not before the end.
    chroot "$root" chown _apt:root /var/cache/apt/archives/partial /var/lib/apt/lists/partial
    # What names this machine or this build has no place in an image that every guest shares. The guest's own sources
    # need no option that names a file of this machine.
    rm -f "$root"/etc/{hostname,hosts,resolv.conf,machine-id} "$root"/var/lib/dbus/machine-id "$root"/var/log/*.log
    rm -rf "$root"/dev "$root"/run
    mkdir -m 0755 "$root"/dev "$root"/run
    : >"$root/etc/machine-id"
    sed -i 's/^deb \[[^]]*\]/deb/' "$root"/etc/apt/sources.list
    mkfs.erofs --quiet -zlz4hc -T0 -U 6b69626f-746f-5364-6562-69616e000012 "$building/debian-12.erofs" "$root" >&2 ||
        die "mkfs.erofs failed, see above"
    rm -rf "$root"
    publish "$image_part"
}

# This machine's own sources for the suite, so that a mirror or a proxy that works here is used.
debian_sources() {
    # shellcheck disable=SC2016 # apt's own fields
    apt-get indextargets --format '$(ORIGIN) $(CODENAME) $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
        awk -v suite="$suite" '
            $1 == "Debian" && ($2 == suite || $2 ~ "^" suite "-(updates|security)$") && $5 == "main" {
                print "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]", $3, $4, $5
            }' | sort -u
}
