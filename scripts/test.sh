#!/usr/bin/env bash
# From nothing to checked code: makes .venv, installs the pinned packages, and runs scripts/check.
# Further words go to pytest:  bash scripts/test.sh tests/sweep -x
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"

install_trainrun dev
export PATH="$venv/bin:$PATH"
exec bash "$root/scripts/check" "$@"
