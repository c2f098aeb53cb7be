# Which tools are needed here, and which versions of Debian's packages the guest is made of.

suite=bookworm

need_tools() {
    local -A package_of=([mmdebstrap]=mmdebstrap [mkfs.erofs]=erofs-utils [lz4]=lz4 [cpio]=cpio [cc]=gcc)
    local tool missing=()
    for tool in "${!package_of[@]}"; do
        command -v "$tool" >/dev/null || missing+=("${package_of[$tool]}")
    done
    ((${#missing[@]})) || return 0
    ((EUID == 0)) || die "missing packages: run as root, or: apt-get install ${missing[*]}"
    need_apt_lists
    say "installing ${missing[*]}"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}" >&2
}

need_apt_lists() {
    compgen -G '/var/lib/apt/lists/*_Packages*' >/dev/null && return
    say "fetching the package lists"
    apt-get update -q >&2
}

# Sets kernel_package, kernel_version and image_versions. Reading apt's lists takes seconds, so the answer is kept for as
# long as the lists are the same.
resolve_packages() {
    need_apt_lists
    local lists resolved
    lists=$({ stat -c '%n %s %Y' /var/lib/apt/lists/*Packages*; cat "$here/packages.sh"; } | digest)
    resolved=$cache/parts/resolved-$lists
    if [[ ! -f $resolved/kernel ]]; then
        begin resolved
        kernel_depends >"$building/kernel"
        required_versions >"$building/image"
        [[ -s $building/image ]] || die "apt knows no required packages of $suite: is this Debian 12? try apt-get update"
        publish "$resolved"
    fi
    read -r kernel_package kernel_version <"$resolved/kernel"
    image_versions=$(<"$resolved/image")
}

# The kernel that the meta package stands for today, as "package version".
kernel_depends() {
    local version package
    version=$(apt-cache policy linux-image-cloud-amd64 | awk '/Candidate:/ { print $2 }')
    [[ -n $version && $version != '(none)' ]] || die "apt has no linux-image-cloud-amd64: run apt-get update"
    package=$(apt-cache show "linux-image-cloud-amd64=$version" |
        sed -n 's/^Depends: \(linux-image-[^ ,]*\).*/\1/p' | head -n 1)
    [[ -n $package ]] || die "linux-image-cloud-amd64 $version names no kernel"
    printf '%s %s\n' "$package" "$version"
}

# What decides whether the root image is still the one that a fresh build would give.
required_versions() {
    apt-cache dumpavail | awk -v RS= '
        /\nPriority: required\n/ || /\nEssential: yes\n/ || /^Package: apt\n/ {
            match($0, /^Package: [^\n]*/); name = substr($0, 10, RLENGTH - 9)
            match($0, /\nVersion: [^\n]*/); print name, substr($0, RSTART + 10, RLENGTH - 10)
        }' | LC_ALL=C sort -u
}
