#!/usr/bin/env bash
# Which releases of Megatron-LM, DeepSpeed and torch dsx goes with: a row each, in Markdown.
#
#   bash scripts/matrix.sh --trees DIR                 # a checked-out Megatron-LM tree a folder
#   bash scripts/matrix.sh --deepspeed 0.19.0,0.19.8   # installed into environments of their own
#   bash scripts/matrix.sh --torch 2.7.1 --quick
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1
exec python scripts/matrix.py "$@"
