"""Pretrain a small GPT: DeepSpeed inside each cluster, dsx between the clusters.

    dsx data build --from stdlib --out data/stdlib
    deepspeed --num_gpus 4 scripts/pretrain_gpt_deepspeed.py \
        --deepspeed_config configs/quickstart.json

The script itself is dsx/examples/pretrain_gpt_deepspeed.py, which `dsx quickstart` starts, too.
"""

from __future__ import annotations

import sys

from dsx.examples.pretrain_gpt_deepspeed import main

if __name__ == "__main__":
    sys.exit(main())
