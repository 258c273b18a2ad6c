# Sourced by quickstart.sh and test.sh: makes .venv beside this folder and fills it with the pinned packages.
# Afterwards `$venv` holds it. Works with the bash 3.2 of macOS.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
pins="$root/scripts/constraints.txt"
torch_pin="$(sed -n 's/^torch==//p' "$pins")"

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

# What pip's own build of the pinned torch, for CUDA 13, asks of a GPU and its driver.
newest_needs_driver=580
newest_needs_capability=75
oldest_driver=525 # of any build for CUDA 12

# Lines `driver capability`, a GPU each: `535.104.05 8.0`; nothing without a GPU. Old drivers do not tell the capability.
ask_driver() {
    command -v nvidia-smi >/dev/null || return 0
    { nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null ||
        nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null || true; } |
        sed -n 's/^\([0-9][0-9.]*\)[, ]*\([0-9.]*\)$/\1 \2/p'
}

# Why pip's own build of torch does not run on the GPUs here, and what does; nothing where it runs.
unfit_build() {
    local driver capability tenths build
    ask_driver | while read -r driver capability; do
        tenths="$(echo "$capability" | tr -d .)"
        if [ "${driver%%.*}" -lt "$oldest_driver" ]; then
            echo "the GPU's driver $driver is too old for every build of torch $torch_pin: install driver $oldest_driver or newer"
        elif [ "${driver%%.*}" -lt "$newest_needs_driver" ] || [ "${tenths:-999}" -lt "$newest_needs_capability" ]; then
            build=cu126 # has all GPUs up to compute capability 9.0
            [ "${tenths:-0}" -lt 100 ] || build=cu128
            echo "pip's own build of torch $torch_pin needs driver $newest_needs_driver and compute capability 7.5; here" \
                "are driver $driver and ${capability:-an unknown one}: set TORCH_INDEX_URL to PyTorch's own index of" \
                "wheels for $build"
        fi
    done | sed -n 1p
}

# PyTorch's index that the user named, now or at the last installation; nothing for pip's own.
torch_index() { echo "${TORCH_INDEX_URL:-$(cat "$venv/torch-index" 2>/dev/null)}"; }

# From another index: only torch itself, whose build names its own CUDA packages.
install_torch() {
    local index other="$venv/constraints.txt"
    index="$(torch_index)"
    if [ -z "$index" ]; then
        pip_install torch
        return
    fi
    grep -v '^cuda-' "$pins" >"$other"
    pins="$other"
    "$venv/bin/python" -m pip uninstall --quiet --yes torch >/dev/null 2>&1 || true
    PIP_INDEX_URL="$index" PIP_EXTRA_INDEX_URL="" pip_install --no-deps torch
    PIP_EXTRA_INDEX_URL="$index ${PIP_EXTRA_INDEX_URL:-}" pip_install torch
    echo "$index" >"$venv/torch-index"
}

say_what_torch_sees() {
    say "$("$venv/bin/python" -W ignore -c '
import torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
print(f"torch {torch.__version__} sees {count} GPU(s): {names}" if count else f"torch {torch.__version__} sees no GPU")')"
}

# What an installation depends on: the pins, our own dependencies, the index of torch, and where the folder lies.
fingerprint() { { cat "$root/scripts/constraints.txt" "$root/pyproject.toml" && echo "$root $(torch_index)"; } | cksum; }

is_installed() { [ -f "$venv/installed-$1" ] && [ "$(cat "$venv/installed-$1")" = "$(fingerprint)" ]; }

# $1: the extra that is wanted besides the dependencies: `gpu`, or `dev`, which holds all of them. Others: the user's
# words, of which parallel.accelerator=cpu says that the GPU is not meant.
install_trainrun() {
    local extra="$1" unfit
    shift
    make_venv
    if is_installed "$extra" || is_installed dev; then
        return
    fi
    unfit="$(unfit_build)"
    if [ -n "$unfit" ] && [ -z "$(torch_index)" ]; then
        case " $* " in
        *" parallel.accelerator=cpu "*) ;;
        *) fail "$unfit, and run this again; or train on the CPU: bash scripts/quickstart.sh parallel.accelerator=cpu" ;;
        esac
    fi
    rm -f "$venv/installed-gpu" "$venv/installed-dev"
    say "installing $(grep '^torch==' "$pins") (the largest part: one to ten minutes, as fast as the network is)"
    install_torch
    say "installing trainrun and the other packages (about a minute)"
    pip_install -e "$root[$extra]"
    fingerprint >"$venv/installed-$extra"
    say_what_torch_sees
    say "installed in $venv"
}
