"""megatron_patches without a GPU: `torchrun ... megatron_lm_on_cpu.py pretrain_gpt.py ...`.

Beside what megatron-core needs (dsx/bench/megatron_on_cpu.py), the training loop asserts that CUDA
is there and compiles C++ helpers into its tree; here a compiled one is expected to be there.
"""

from __future__ import annotations

import collections
import multiprocessing.spawn
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
    _copy_what_is_written_beside()
    _start_without_the_script()
    import megatron.core.models.bert.bert_layer_specs as bert
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.training.initialize as initialize

    if not hasattr(moe_utils, "te_general_gemm"):  # core 0.16.1 looks for it without asking
        moe_utils.te_general_gemm = None  # whether Transformer Engine is there
    # which pretrain_bert.py imports, whatever layers it is told to build
    bert.bert_layer_with_transformer_engine_spec = None
    kernels = getattr(initialize, "fused_kernels", None)
    if kernels is not None:  # up to core 0.16
        kernels.load = lambda args: None


def _copy_what_is_written_beside() -> None:
    """Let `--async-save` write what there was as it began: from a device it is copied before."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as writing

    kind = writing.FileSystemWriterAsync
    prepare = kind.prepare_write_data

    def prepare_write_data(self: Any, plan: Any, planner: Any) -> None:
        prepare(self, plan, planner)
        self.write_buckets = [
            (path, name, (whole, [(item, tensor.clone()) for item, tensor in tensors]))
            for path, name, (whole, tensors) in self.write_buckets or []
        ]

    kind.prepare_write_data = prepare_write_data
    import megatron.core.dist_checkpointing.strategies.async_utils as beside

    from tests.launch import megatron_lm_on_cpu  # by its name, which another process can import

    caller: Any = beside.PersistentAsyncCaller
    caller.async_loop = staticmethod(megatron_lm_on_cpu.write_beside)


def _start_without_the_script() -> None:
    """Let processes that Megatron spawns not import its script, which has nothing of ours there."""
    prepare = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {k: v for k, v in prepare(name).items() if k != "init_main_from_path"}

    multiprocessing.spawn.get_preparation_data = get_preparation_data


def write_beside(*arguments: Any) -> None:
    """Be the process that writes checkpoints beside training, without a device to choose."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    cuda: Any = torch.cuda  # behind the imports: torch's compiler keeps a list of its functions
    cuda.device_count = lambda: 1
    cuda.set_device = lambda *args: None
    cuda.synchronize = lambda *args: None
    PersistentAsyncCaller.async_loop(*arguments)


if __name__ == "__main__":
    install()
    from megatron_patches.__main__ import main

    main()
