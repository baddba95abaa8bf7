"""Megatron's own optional accelerators: whether they are installed, and what is without them.

By where megatron-core 0.16 looks for them, and what it takes in their place.
"""

from __future__ import annotations

from dsx.core.requirements import installed_version

_WITHOUT = {
    "transformer-engine": (
        "layers are megatron-core's local ones, whose attention keeps all scores; no context "
        "parallelism, no fp8"
    ),
    "apex": (
        "without Transformer Engine, too, Adam is torch's, and layer norms and gradients' norms "
        "are not fused"
    ),
}


def missing_accelerators() -> list[str]:
    """Return a line for each that is not installed, with what Megatron does then."""
    return [
        f"{name} is not installed: {instead} (docs/accelerators.md)"
        for name, instead in _WITHOUT.items()
        if installed_version(name) is None
    ]
