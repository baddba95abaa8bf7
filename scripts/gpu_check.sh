#!/usr/bin/env bash
# What only a machine with GPUs can show: a table in Markdown, then its tests. Ten minutes.
# Further arguments go to `dsx bench gpu`, e.g. `bash scripts/gpu_check.sh --gpus 2 --out check`.
set -uo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh || exit
export PATH="$PWD/.venv/bin:$PATH"
status=0
dsx bench gpu "$@" || status=$?
python -m pytest -q -n 0 -m gpu tests/gpu tests/compress/wire/test_kernels.py || status=$?
exit "$status"
