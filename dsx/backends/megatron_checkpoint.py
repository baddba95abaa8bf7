"""The old spelling of `dsx.engines.megatron.checkpoint`."""

from __future__ import annotations

from dsx.core.renamed import warn_renamed
from dsx.engines.megatron.checkpoint import load_outer_state, save_outer_state

__all__ = ["load_outer_state", "save_outer_state"]
warn_renamed("dsx.backends.megatron_checkpoint", "dsx.engines.megatron.checkpoint")
