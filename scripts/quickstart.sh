#!/usr/bin/env bash
# Train a small GPT across two clusters of two ranks on this host: some minutes on two CPU cores.
# Further arguments go to the training script, e.g. `bash scripts/quickstart.sh --steps 40`.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
exec dsx quickstart "$@"
