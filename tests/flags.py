"""What flags say, resolved, as a script whose settings are flags reads them."""

from __future__ import annotations

from collections.abc import Sequence

from dsx.config.flags import block_of_flags
from dsx.config.schema import DsxConfig, load_config


def read_flags(arguments: Sequence[str]) -> DsxConfig:
    """Return what the flags among `arguments` say."""
    return load_config(block_of_flags(arguments))
