"""Low-rank channels against torch's own PowerSGD hook, in two processes, quantization off.

Both start from the same Q. The hook's residual is measured from the mean's reconstruction, ours
from the own one: each differs, their sum over clusters does not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.compress.channels import Clusters, correlated, fragment_of, nmse
from tests.compress.matrices import EXACT, plain_low_rank
from tests.distributed import run_distributed

SHAPES = [(64, 48), (20,), (40, 72)]
RANK, NUM_ROUNDS, NUM_CLUSTERS = 6, 6, 2
FRAGMENT = fragment_of(*SHAPES)


def gradients(round: int) -> list[Tensor]:
    return correlated(FRAGMENT.numel, NUM_CLUSTERS, seed=round)


def first_directions(index: int) -> Tensor:
    """Q `[n, r]` to start from."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(SHAPES[index][1], RANK, generator=generator)


class Bucket:
    """What the hook asks of a `GradBucket`, which Python cannot construct."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return [
            self._flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
            for slot in FRAGMENT.layout
        ]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def run_hook(has_feedback: bool) -> list[tuple[Any, Any]]:
    """This rank's (mean, residual) of every round."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
        PowerSGDState,
        powerSGD_hook,
    )

    state = PowerSGDState(
        None, RANK, 2, min_compression_rate=1, use_error_feedback=has_feedback, warm_start=True
    )
    state.iter = 2
    matrices = [i for i, shape in enumerate(SHAPES) if len(shape) == 2]
    state.q_memory_dict[0] = torch.cat([first_directions(i).reshape(-1) for i in matrices])
    state.p_memory_dict[0] = torch.empty(sum(SHAPES[i][0] for i in matrices) * RANK)
    found: list[tuple[Any, Any]] = []
    for round in range(NUM_ROUNDS):
        flat = gradients(round)[dist.get_rank()]
        mean = powerSGD_hook(state, Bucket(flat)).wait()  # type: ignore[arg-type]
        residual = state.error_dict[0] if has_feedback else torch.zeros(1)
        found.append((mean.clone().numpy(), residual.clone().numpy()))
    return found


def run_hook_both_ways() -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
    dist.init_process_group("gloo")
    return run_hook(True), run_hook(False)


def run_channels(feedback: Any) -> list[tuple[Tensor, list[Tensor]]]:
    """Every round's mean, and the clusters' residuals of the whole fragment."""
    method = plain_low_rank(**{**EXACT, "rank": RANK, "error_feedback": feedback})
    clusters = Clusters(method, FRAGMENT, NUM_CLUSTERS)
    for channel in clusters.channels:
        channel.slots["rank"].fill_(RANK)
        for index in (0, 2):
            channel.slots[f"q.w{index}"].copy_(first_directions(index).T)
    found: list[tuple[Tensor, list[Tensor]]] = []
    for round in range(NUM_ROUNDS):
        mean = clusters.average(gradients(round))
        residuals = [
            torch.cat([c.slots["residual.0"], torch.zeros(20), c.slots["residual.1"]])
            if feedback != "none"
            else torch.zeros(1)
            for c in clusters.channels
        ]
        found.append((mean, residuals))
    return found


def test_means_and_summed_residuals_agree() -> None:
    hooks = run_distributed(run_hook_both_ways, NUM_CLUSTERS)
    for way, feedback in enumerate(("fp32", "none")):
        means: list[Tensor] = []
        for round, (mean, residuals) in enumerate(run_channels(feedback)):
            for rank in range(NUM_CLUSTERS):
                expected = torch.from_numpy(hooks[rank][way][round][0])
                assert nmse(mean, expected) ** 0.5 <= 1e-5
            means.append(mean)
            if feedback != "none":
                theirs = sum(torch.from_numpy(hook[way][round][1]) for hook in hooks)
                assert nmse(sum(residuals), theirs) ** 0.5 <= 1e-5
                assert theirs.norm() > means[-1].norm()
        assert nmse(means[0], sum(gradients(0)) / 2) > 0.1  # so that agreeing says something
