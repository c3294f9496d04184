# Shared by the scripts beside it: where things are, and how to say things. Sourced, never run.
set -eu
ROOT=$(cd "$(dirname "$0")/.." && pwd)
CACHE=${BOOTSEER_DEV_CACHE:-${XDG_CACHE_HOME:-${HOME:?is not set: set it, or BOOTSEER_DEV_CACHE}/.cache}/bootseer-dev}
VENV=$ROOT/.venv
export UV_CACHE_DIR=${UV_CACHE_DIR:-$CACHE/uv} UV_LINK_MODE=${UV_LINK_MODE:-hardlink}
export BOOTSEER_DEV_CACHE=$CACHE

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }
as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"
    elif command -v sudo >/dev/null; then sudo -E "$@"
    else die "this step needs root: run as root or install sudo"; fi
}
need_disk() ( # need_disk GiB: stop early rather than fill the disk; its variables are its own
    mkdir -p "$CACHE" 2>/dev/null && [ -w "$CACHE" ] || die "$CACHE cannot be written; point BOOTSEER_DEV_CACHE at a folder that can"
    for place in "$CACHE" "$ROOT"; do
        free=$(df -Pk "$place" | awk 'NR==2 {print int($4 / 1048576)}')
        [ "$free" -ge "$1" ] || die "only $free GiB free at $place, $1 GiB needed; free some, or point BOOTSEER_DEV_CACHE at another disk"
    done
)
alone() { # alone DIR: this script is the only one that builds there, from now to its end; another one waits for it
    mkdir -p "$1"
    exec 9>"$1/lock"
    flock -n 9 && return
    say "another script builds in $1: waiting for it"
    flock -w 1800 9 || die "another script has been building in $1 for half an hour; stop it: fuser $1/lock"
}
