#!/usr/bin/env bash
# Unpack Debian's packages of Slurm into a folder, without installing them, for tests/launch/test_real_slurm.py:
#   bash scripts/unpack_slurm.sh DIR && SLURM_ROOT=DIR python -m pytest tests/launch/test_real_slurm.py
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
cd "$packages"
apt-get download slurmd slurmctld slurm-client slurm-wlm-basic-plugins munge libmunge2 libhwloc15
for package in *.deb; do dpkg -x "$package" "$folder"; done
echo "Slurm is in $folder"
