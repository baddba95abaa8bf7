"""`--distributed-timeout-minutes`, of the world that dsx makes in Megatron's place."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import timedelta


def timeout_of(arguments: Sequence[str]) -> timedelta | None:
    """Return what the flag says of Megatron's default group; None where it is not given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--distributed-timeout-minutes", type=int)
    minutes = parser.parse_known_args(arguments)[0].distributed_timeout_minutes
    return None if minutes is None else timedelta(minutes=minutes)
