#!/usr/bin/env bash
# Train a small GPT across two clusters of two ranks on this host: five minutes on two CPU cores.
# Further arguments go to the training script, e.g. `bash scripts/quickstart.sh --steps 40`.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1

gpus=$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)
if [ "$gpus" -lt 4 ]; then  # one device per rank, or all ranks on the CPU
    export CUDA_VISIBLE_DEVICES="" DS_ACCELERATOR=cpu
fi

dsx data build --from stdlib --out data/stdlib
exec deepspeed --num_gpus 4 scripts/pretrain_gpt_deepspeed.py \
    --deepspeed_config configs/quickstart.json "$@"
