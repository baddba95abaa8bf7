"""What may stand on the command line of the quickstart's script, readable without torch."""

from __future__ import annotations

import argparse
from pathlib import Path


def pretraining_arguments() -> argparse.ArgumentParser:
    """Return the parser of pretrain_gpt_deepspeed.py, without the arguments of its libraries."""
    parser = argparse.ArgumentParser(
        description="Pretrain a small GPT on byte tokens with DeepSpeed and dsx.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--local_rank", type=int, default=-1, help="set by the launcher")
    add("--data", type=Path, default=Path("data/stdlib"), help="built by `dsx data build`")
    add("--run-dir", type=Path, help="where results go; none: dsx.metrics.dir of the config")
    add("--steps", type=positive, default=160, help="inner steps, also of the LR schedule")
    add("--pipeline-stages", type=positive, default=1, help="inside a cluster; 1: no pipeline")
    add("--layers", type=positive, default=4, help="transformer layers")
    add("--hidden", type=positive, default=256, help="width of the model")
    add("--heads", type=positive, default=4, help="attention heads")
    add("--sequence-length", type=positive, default=128, help="tokens per sample")
    add("--seed", type=int, default=0, help="of the weights and of the order of the data")
    add("--save-interval", type=positive, help="steps between checkpoints; none: at the end only")
    add("--max-minutes", type=float, metavar="M", help="stop early, save, and end as ever")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --run-dir")
    add("--validation-batches", type=positive, default=16, help="micro batches per rank")
    add("--trace", action="store_true", help="record where the time goes, for `dsx trace`")
    add("--log-interval", type=positive, default=10, help="steps between progress reports")
    return parser


def positive(text: str) -> int:
    """Read a whole number above 0, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least 1")
    return int(text)
