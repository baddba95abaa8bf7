"""What a step takes for its arithmetic alone: operations of its tokens over what a cluster does.

A token takes 2 operations of each parameter it goes through forward, and 4 backward. Attention's
own products are not in it, nor activations that are made again: neither are in an MFU.
"""

from __future__ import annotations

USUAL_MFU = 0.4
PEAK_FLOPS = {"a100": 312e12, "a800": 312e12, "h100": 989e12}  # bf16, dense
_EACH = 6  # operations of a parameter and a token


def require_gpu(gpu: str) -> float:
    """Return an accelerator's bf16 rate, in operations a second; ValueError for another name."""
    if gpu not in PEAK_FLOPS:
        raise ValueError(f"--gpu {gpu} is not known; allowed: {', '.join(PEAK_FLOPS)}")
    return PEAK_FLOPS[gpu]


def seconds_of_step(parameters: float, tokens: float, ranks: int, gpu: str, mfu: float) -> float:
    """Return the seconds of a step of a cluster; `mfu`: the share of the peak that those take."""
    return _EACH * parameters * tokens / (ranks * require_gpu(gpu) * mfu)
