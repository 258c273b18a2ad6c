#!/usr/bin/env bash
# From nothing to checked code: makes .venv, installs the pinned packages, and runs scripts/check.
#   bash scripts/test.sh                   the tests without processes or whole runs
#   bash scripts/test.sh all               every test that this machine can run
#   bash scripts/test.sh tests/sweep -x    other arguments go to pytest
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"

install_trainrun dev
export PATH="$venv/bin:$PATH"
exec bash "$root/scripts/check" "$@"
