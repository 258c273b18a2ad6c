# Sourced by quickstart.sh and test.sh: makes .venv beside this folder and fills it with the pinned packages.
# Afterwards `$venv` holds it. Works with the bash 3.2 of macOS.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
pins="$root/scripts/constraints.txt"

say() { printf '%s\n' "trainrun: $*"; }
fail() {
    printf '%s\n' "trainrun: $*" >&2
    exit 1
}

# The pins hold for these versions: numpy and torch bring a build for each.
is_suitable() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }

find_python() {
    local name without_venv=""
    for name in python3 python3.13 python3.12 python3.11 python3.10 python3.14 python; do
        is_suitable "$name" || continue
        if "$name" -c 'import ensurepip, venv' 2>/dev/null; then
            python="$name"
            return
        fi
        without_venv="${without_venv:-$name}"
    done
    [ -z "$without_venv" ] || fail "$without_venv cannot make virtual environments; on Debian and Ubuntu:" \
        "sudo apt install python3-venv   (then run this again)"
    fail "no Python 3.10 to 3.14 was found (looked for python3, python3.10 ... python3.14); install one and run this again"
}

make_venv() {
    if is_suitable "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    find_python
    say "making .venv with $("$python" --version) (a few seconds)"
    "$python" -m venv --clear "$venv" || fail "$venv could not be made; the lines above say why"
}

# pip's own words are kept in a file; what they usually mean is said in one line.
pip_install() {
    local log="$venv/install.log"
    if PIP_CONSTRAINT="$pins" PIP_BUILD_CONSTRAINT="$pins" "$venv/bin/python" -m pip install \
        --quiet --disable-pip-version-check --no-input --retries 3 "$@" >"$log" 2>&1; then
        return
    fi
    if grep -qiE 'no space left|errno 28|disk quota' "$log"; then
        fail "the disk is full: torch needs several GB (most with its GPU libraries); free some and run this again"
    elif grep -qiE 'name resolution|name or service|nodename nor servname|connection|unreachable|timed out|max retries' "$log"; then
        fail "the packages could not be downloaded: is there a network? Then run this again (all of pip's words: $log)"
    fi
    grep -v '^WARNING' "$log" | tail -n 12 >&2
    fail "the installation failed (all of pip's words: $log)"
}

# What an installation depends on: the pins, our own dependencies, and where the folder lies.
fingerprint() { { cat "$pins" "$root/pyproject.toml" && echo "$root"; } | cksum; }

is_installed() { [ -f "$venv/installed-$1" ] && [ "$(cat "$venv/installed-$1")" = "$(fingerprint)" ]; }

# $1: the extra that is wanted besides the dependencies: `gpu`, or `dev`, which holds all of them.
install_trainrun() {
    local extra="$1"
    make_venv
    if is_installed "$extra" || is_installed dev; then
        return
    fi
    rm -f "$venv/installed-gpu" "$venv/installed-dev"
    say "installing $(grep '^torch==' "$pins") (the largest part: one to ten minutes, as fast as the network is)"
    pip_install torch
    say "installing trainrun and the other packages (about a minute)"
    pip_install -e "$root[$extra]"
    fingerprint >"$venv/installed-$extra"
    say "installed in $venv"
}
