#!/usr/bin/env bash
# Lint, then run the tests, on every core. Further arguments go to pytest, e.g.
# `bash scripts/test.sh tests/core`, or `-n 0` for one process.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE  # or every worker, rank and command compiles what it imports
python -m ruff check .
python -m ruff format --check --quiet .
exec python -m pytest -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder "$@"
