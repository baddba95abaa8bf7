"""What may stand on the command line of the quickstart's script, readable without torch."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

SHARDS = ("iid", "contiguous", "skewed", "own")  # but for the last, of dsx.data.shards
MOST = 10**9


def pretraining_arguments() -> argparse.ArgumentParser:
    """Return the parser of pretrain_gpt_deepspeed.py, without the arguments of its libraries."""
    parser = argparse.ArgumentParser(
        description="Pretrain a small GPT on byte tokens with DeepSpeed and dsx.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--local_rank", type=int, default=-1, help="set by the launcher")
    add("--data", type=Path, default=Path("data/stdlib"), help="built by `dsx data build`")
    add(
        "--scaled-down", type=Path, metavar="FILE",
        help="a JSON as --deepspeed_config takes, such as those in configs/paper, its method kept "
        "and all else made small enough for a CPU",
    )  # fmt: skip
    add("--run-dir", type=Path, help="where results go; none: dsx.metrics.dir of the config")
    add("--steps", type=positive, default=160, help="inner steps, also of the LR schedule")
    add("--pipeline-stages", type=positive, default=1, help="inside a cluster; 1: no pipeline")
    add("--layers", type=positive, default=4, help="transformer layers")
    add("--hidden", type=positive, default=256, help="width of the model")
    add("--heads", type=positive, default=4, help="attention heads")
    add("--sequence-length", type=positive, default=128, help="tokens per sample")
    add("--qk-norm", action="store_true", help="normalise queries and keys")
    add("--z-loss", type=weight, default=0.0, metavar="W", help="weight of log(Z)^2 in training")
    add("--seed", type=seed, default=0, help="of the weights and of the order of the data")
    add(
        "--shards",
        choices=SHARDS,
        default="iid",
        help="whether clusters read the like; own: each all",
    )
    add("--save-interval", type=positive, help="steps between checkpoints; none: at the end only")
    add("--max-minutes", type=minutes, metavar="M", help="stop early, save, and end as ever")
    add("--resume", action="store_true", help="go on from the newest checkpoint in --run-dir")
    add("--validation-batches", type=positive, default=16, help="micro batches per rank")
    add("--trace", action="store_true", help="record where the time goes, for `dsx trace`")
    add("--log-interval", type=positive, default=10, help="steps between progress reports")
    return parser


def positive(text: str) -> int:
    """Read a whole number above 0, for argparse."""
    if not text.isdecimal() or not 1 <= int(text[:20]) <= MOST or len(text) > 20:
        raise argparse.ArgumentTypeError(
            f"{text[:40]} must be a whole number from 1 to {MOST:.0e}; try 1"
        )
    return int(text)


def weight(text: str) -> float:
    """Read a number of at least 0, for argparse."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < MOST:
        raise argparse.ArgumentTypeError(
            f"{text[:40]} must be a number of at least 0 and below {MOST}; try 1e-4"
        )
    return found


def seed(text: str) -> int:
    """Read a whole number that numpy and torch take as a seed, for argparse."""
    if not text.isdecimal() or len(text) > 20 or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(
            f"{text[:40]} must be a whole number of at least 0 and below 2^32; try 0"
        )
    return int(text)


def minutes(text: str) -> float:
    """Read a time that passes, for argparse."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < MOST:
        raise argparse.ArgumentTypeError(
            f"{text[:40]} must be a number of minutes above 0 and below {MOST}; try 30"
        )
    return found


def require_heads(hidden: int, heads: int) -> None:
    """Raise ValueError unless the width is cut into heads of whole pairs."""
    step = 2 * heads
    if hidden % step:
        raise ValueError(
            f"--hidden {hidden} must be a multiple of 2 * --heads = {step} (rotary positions turn "
            f"pairs); try --hidden {-(-hidden // step) * step}"
        )
