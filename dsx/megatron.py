"""The old spelling of `python -m megatron_patches`."""

from __future__ import annotations

from dsx.core.renamed import warn_renamed
from megatron_patches.__main__ import main

__all__ = ["main"]
warn_renamed("python -m dsx.megatron", "python -m megatron_patches")

if __name__ == "__main__":
    main()
