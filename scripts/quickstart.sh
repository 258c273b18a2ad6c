#!/usr/bin/env bash
# From nothing to a trained model: makes .venv, installs the pinned packages, and trains.
# Further words are passed on:  bash scripts/quickstart.sh data=fashion_mnist model=cnn
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"

install_trainrun gpu "$@"
say "running: $venv/bin/trainrun $*"
"$venv/bin/trainrun" "$@" # a process of its own: the run's time begins with it, and not with the installation
