"""The flags of dsx by themselves: whether there are any, and what they are, without Megatron."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

USAGE = "python -m megatron_patches SCRIPT [--dsx-... VALUE] [Megatron's flags]"
_PREFIX = "--dsx"
_CLUSTER = "{cluster_id}"


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether the flags are only to be shown."""
    return bool({"-h", "--help"} & set(arguments))


def is_off(arguments: Sequence[str]) -> bool:
    """Whether no flag of dsx is given, so that Megatron is to run as it does without it.

    ValueError if an argument stands for a cluster's number, as there are no clusters then.
    """
    if any(word.startswith(_PREFIX) for word in arguments):
        return False
    named = next((word for word in arguments if _CLUSTER in word), None)
    if named is not None:
        raise ValueError(
            f"{named} has a cluster's number in it, and without a --dsx-* flag there are no "
            "clusters; add --dsx-preset and --dsx-num-clusters, or give a value without it"
        )
    return True


def listed() -> str:
    """Return all flags of dsx, as a parser's help has them; needs neither Megatron nor torch."""
    from dsx.config.flags import add_flags

    parser = argparse.ArgumentParser(usage=USAGE, add_help=False, allow_abbrev=False)
    return add_flags(parser).format_help()
