"""megatron_patches without a GPU: `torchrun ... megatron_lm_on_cpu.py pretrain_gpt.py ...`.

Beside what megatron-core needs (dsx/bench/megatron_on_cpu.py), the training loop asserts that CUDA
is there and compiles C++ helpers into its tree; here a compiled one is expected to be there.
"""

from __future__ import annotations

import collections
import typing
from typing import Any

import torch

from dsx.bench import megatron_on_cpu


def install() -> None:
    """Let an unmodified pretraining script run on the CPU."""
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]  # Python < 3.12
    megatron_on_cpu.install()
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.memory_stats = lambda *args: collections.defaultdict(int)
    cuda.device_memory_used = lambda *args: 0
    import megatron.core.datasets.utils as datasets

    datasets.compile_helpers = lambda: None
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.training.initialize as initialize

    if not hasattr(moe_utils, "te_general_gemm"):  # core 0.16.1 looks for it without asking
        moe_utils.te_general_gemm = None  # whether Transformer Engine is there
    kernels = getattr(initialize, "fused_kernels", None)
    if kernels is not None:  # up to core 0.16
        kernels.load = lambda args: None


if __name__ == "__main__":  # data workers and checkpoint writers import this file anew
    install()
    from megatron_patches.__main__ import main

    main()
