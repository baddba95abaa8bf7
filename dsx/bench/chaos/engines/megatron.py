"""A small GPT of megatron-core, tensor parallel over a cluster's ranks, on the CPU.

Its loop counts by dsx's steps, as one on megatron-core does: which samples a cluster reads follows
from the step and the cluster alone. Nobody reads those of a cluster that is lost, and one that
comes back goes on at the step of the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import dsx
from dsx.bench.chaos.engines.engine import Step, digest
from dsx.bench.chaos.engines.own_saves import OwnSaves
from dsx.bench.chaos.job import Job
from dsx.bench.megatron_chunk import chunk_and_optimizer
from dsx.bench.megatron_on_cpu import install

HIDDEN, HEADS, LAYERS, VOCAB, LENGTH = 32, 8, 2, 32, 8
ROWS = 8  # windows of a sample
RATE, DECAY = 2e-3, 0.01
_NOISE = 0.25  # of the tokens, which nobody can foresee: the loss stays well above zero
_EVALUATED = range(10_000_000, 10_000_064)  # samples that nobody trains on
_IMPORTS = (
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "dsx.engines.attach",
    "dsx.engines.megatron.engine",
    "dsx.engines.megatron.checkpoint",
    "dsx.engines.megatron.settings",
)


def warm() -> None:
    """Import what ranks need, behind what lets it run without a GPU."""
    install()
    for name in _IMPORTS:
        importlib.import_module(name)


def build(job: Job, cluster: int, rank: int) -> TensorParallel:
    """Join the run, and return a model with dsx attached. Collective over all clusters."""
    dsx.init_distributed(job.dsx(cluster))
    return TensorParallel(job, cluster)


class TensorParallel:
    """One rank."""

    def __init__(self, job: Job, cluster: int) -> None:
        from megatron.core import parallel_state, tensor_parallel

        parallel_state.initialize_model_parallel(job.num_ranks)
        torch.manual_seed(job.seed)
        seed_slices: Any = tensor_parallel.model_parallel_cuda_manual_seed
        seed_slices(job.seed, force_reset_rng=True)
        self._cluster, self._num_clusters = cluster, job.num_clusters
        self._chunk, self._optimizer = _model_and_optimizer(job.num_ranks)
        self.handle = dsx.attach_megatron([self._chunk], self._optimizer, config=job.dsx(cluster))
        self._saves = OwnSaves(self.handle, self._state)

    def masters(self) -> Sequence[Tensor]:
        """Return the parameters, which are fp32 and the masters themselves."""
        return [*self._chunk.parameters()]

    def step(self) -> Step:
        """Take one step on the cluster's next sample, which its ranks compute together."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        sample = self.handle.step * self._num_clusters + self._cluster
        self._chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        schedule: Any = get_forward_backward_func()
        (told,) = schedule(
            forward_step_func=_forward_step, data_iterator=iter([windows_of([sample])]),
            model=[self._chunk], num_microbatches=1, seq_length=LENGTH, micro_batch_size=ROWS,
            forward_only=False,
        )  # fmt: skip
        self._optimizer.step()
        return Step([sample], told["loss"].item())

    def save(self, base: Path, tag: str) -> None:
        """Save the outer state, and beside it each rank's slices and optimizer."""
        self._saves.save(base, tag)

    def _state(self) -> dict[str, Any]:
        weights = {name: p.detach() for name, p in self._chunk.named_parameters()}
        return {"model": weights, "optimizer": self._optimizer.state_dict()}

    def evaluate(self) -> float:
        """Return the mean cross-entropy of a token."""
        with torch.no_grad():
            return float(_losses(self._chunk, windows_of(_EVALUATED)).mean())

    def weights_hash(self) -> str:
        """Return a hash of all slices, and of what this rank holds as the others do."""
        slices, alike = list[Tensor](), list[Tensor]()
        for parameter in self._chunk.parameters():
            is_slice = getattr(parameter, "tensor_model_parallel", False)
            (slices if is_slice else alike).append(parameter)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, digest(slices))
        return " ".join([*everyone, digest(alike)])


def windows_of(samples: Iterable[int]) -> Tensor:
    """Return tokens, int64 [len(samples) * ROWS, LENGTH + 1]: most follow from those before."""
    windows: list[Tensor] = []
    for number in samples:
        generator = torch.Generator().manual_seed(number)
        chance = torch.rand(ROWS, LENGTH + 1, generator=generator)
        free = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
        tokens = [free[:, 0]]
        for place in range(1, LENGTH + 1):
            follows = (3 * tokens[-1] + 1) % VOCAB
            tokens.append(torch.where(chance[:, place] < _NOISE, free[:, place], follows))
        windows.append(torch.stack(tokens, dim=1))
    return torch.cat(windows)


def _losses(model: Any, windows: Tensor) -> Tensor:
    """Return the loss of each token, [len(windows), LENGTH]."""
    positions = torch.arange(LENGTH).expand(len(windows), -1)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    return model(windows[:, :-1], positions, hidden, labels=windows[:, 1:].contiguous())


def _mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return losses.mean(), {"loss": losses.detach().mean()}


def _forward_step(batches: Any, model: Any) -> Any:
    return _losses(model, next(batches)), _mean


def _model_and_optimizer(num_ranks: int) -> tuple[Any, Any]:
    """Return what `megatron.training` makes of such a model: fp32, Adam, clipped gradients."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS,
        ffn_hidden_size=2 * HIDDEN, tensor_model_parallel_size=num_ranks,
        use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0,
        masked_softmax_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=VOCAB, max_sequence_length=LENGTH
    )
    return chunk_and_optimizer(config, model, RATE, DECAY)
