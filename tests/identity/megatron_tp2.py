"""A GPT of megatron-core, tensor parallel over two ranks, in two clusters: `dsx.attach_megatron`.

On the CPU, with the tree's own `megatron_on_cpu`. Of Megatron, each rank saves and loads what its
own modules and optimizer give, with torch; what is examined is the outer state beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import stopped
from .evidence import Run, digest
from .models import ROWS, block

TENSOR_PARALLEL, ITERATION = 2, 100  # Megatron's count need not be that of dsx
NUM_LAYERS, HIDDEN, HEADS, VOCAB, LENGTH = 4, 32, 2, 64, 8
MICRO_BATCHES, MICRO_SIZE = 2, 2
PRECISIONS = {
    "streaming_diloco": "fp32",
    "dilocox": "fp32",
    "eager": "bf16",
    "streaming, int4, feedback": "bf16",
}
_world: Any = None  # of this process


def record(workspace: str) -> dict[str, Run]:
    rows = {name: ROWS[name] for name in PRECISIONS}
    return stopped.record(workspace, rows, stopped.NUM_CLUSTERS * TENSOR_PARALLEL, Tensor2)


class Tensor2:
    """A model chunk and its optimizer, as `megatron.training` builds them."""

    def __init__(self, name: str, metrics: str, saved: Path | None) -> None:
        import dsx

        config = block(ROWS[name], stopped.NUM_CLUSTERS, metrics)
        self._world = _join(config)
        self.chunk, self.optimizer, self._schedule = build(PRECISIONS[name], self._world.cluster_id)
        resume = None
        if saved is not None:
            held = torch.load(self._engine_file(saved), weights_only=False)
            self.chunk.load_state_dict(held["model"])
            self.optimizer.load_state_dict(held["optimizer"])
            resume = (saved, ITERATION)
        self.handle = dsx.attach_megatron(
            [self.chunk], self.optimizer, config=config, resume=resume
        )

    def step(self, step: int) -> float:
        cluster = self.handle.cluster_id
        batches = iter([batch(cluster, step, micro) for micro in range(MICRO_BATCHES)])
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        results = self._schedule(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=self.chunk,
            num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=MICRO_SIZE,
            forward_only=False,
        )
        was_taken, *_ = self.optimizer.step()
        if not was_taken:
            raise RuntimeError(f"Megatron has skipped step {step}")
        return torch.stack([r["loss"] for r in results]).mean().item()

    def weights(self) -> str:
        return digest({n: p.detach() for n, p in self.chunk.named_parameters()})

    def save(self, directory: Path) -> None:
        save_outer_state()(self.handle, ITERATION, directory)
        held = {"model": self.chunk.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(held, self._engine_file(directory))

    def close(self) -> None:
        self.handle.close()

    def _engine_file(self, base: Path) -> Path:
        return base / f"engine_{self._world.cluster_id}_{self._world.rank}.pt"


def save_outer_state() -> Any:
    """Return the function that saves: in packages by idea it lies elsewhere than in 0.1.0."""
    try:
        from dsx.engines.megatron.checkpoint import save_outer_state
    except ModuleNotFoundError:
        from dsx.backends.megatron_checkpoint import save_outer_state
    return save_outer_state


def build(precision: str, seed: int) -> tuple[Any, Any, Any]:
    """Return a chunk, its optimizer and Megatron's schedule."""
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    config = transformer_config(precision)
    module: Any = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=VOCAB, max_sequence_length=LENGTH
    )
    if precision == "bf16":
        module = Float16Module(config, module)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    chunk = DistributedDataParallel(config, ddp, module)
    chunk.broadcast_params()
    settings = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        weight_decay=0.01,
        adam_eps=1e-3,
        bf16=precision == "bf16",
        params_dtype=config.params_dtype,
        clip_grad=1.0,
    )
    optimizer = get_megatron_optimizer(settings, [chunk])
    for group in optimizer.param_groups:  # what Megatron's scheduler does at every step
        group["lr"], group["weight_decay"] = 0.01, 0.01 * group["wd_mult"]
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return chunk, optimizer, get_forward_backward_func()


def transformer_config(precision: str) -> Any:
    from megatron.core.transformer import TransformerConfig

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    return TransformerConfig(
        num_layers=NUM_LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=2 * HIDDEN,
        tensor_model_parallel_size=TENSOR_PARALLEL,
        params_dtype=dtype,
        bf16=precision == "bf16",
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        attention_softmax_in_fp32=True,
    )


def batch(cluster: int, step: int, part: int) -> Tensor:
    """Windows `[MICRO_SIZE, LENGTH + 1]` in which each token follows from the one before."""
    generator = torch.Generator().manual_seed(10_000 * cluster + 100 * step + part)
    rows = [torch.randint(VOCAB, (MICRO_SIZE,), generator=generator)]
    for _ in range(LENGTH):
        rows.append((3 * rows[-1] + 1 + cluster) % VOCAB)
    return torch.stack(rows, dim=1)


def forward_step(batches: Iterator[Tensor], model: Any) -> Any:
    windows = next(batches)
    positions = torch.arange(LENGTH).expand(len(windows), -1)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]  # what is hidden
    losses = model(windows[:, :-1], positions, mask, labels=windows[:, 1:])
    return losses, lambda output: (output.float().mean(), {"loss": output.detach().float().mean()})


def _join(config: dict[str, Any]) -> Any:
    """Join this process's cluster once, with megatron-core on the CPU."""
    global _world
    if _world is None:
        import dsx

        tree = Path(dsx.__file__).parents[1]
        (found,) = (
            path
            for folder in ("scripts", "tests", "megatron_patches", "dsx")
            for path in (tree / folder).rglob("megatron_on_cpu.py")
        )
        sys.path.append(str(found.parent))
        from megatron_on_cpu import install

        install()
        _world = dsx.init_distributed(config)
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(TENSOR_PARALLEL)
    return _world
