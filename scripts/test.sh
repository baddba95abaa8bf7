#!/usr/bin/env bash
# Lint, then run the tests, on every core: with half as many processes again, since tests wait for
# ranks, deadlines and lines much of their time. Further arguments go to pytest, e.g.
# `bash scripts/test.sh tests/core`, or `-n 0` for one process.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE  # or every worker, rank and command compiles what it imports
python -m ruff check .
python -m ruff format --check --quiet .
cores=$(python -c 'import os; print(os.cpu_count())')
exec python -m pytest -n "$(((cores * 3 + 1) / 2))" --maxprocesses 8 --dist loadfile --no-loadscope-reorder "$@"
