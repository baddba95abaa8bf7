"""The gate of every codec: recorded pseudo-gradients, replayed, must end up in the same place.

A small model is trained by DiLoCo in plain torch, and every cluster's pseudo-gradients are kept.
Each codec then averages them round by round; what counts is the squared error of the total
displacement after the outer Nesterov steps, which has none of the chaos of a training run.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsx.compress.base import Compressor, Dense
from dsx.compress.low_rank import LowRank
from dsx.compress.quantized import Quantized
from tests.compress.channels import Clusters, exact_mean, fragment_of, nmse
from tests.levels import by_default

NUM_ROUNDS, H = 16, 10
LR, MOMENTUM = 0.7, 0.9
SHAPES = [(96, 64), (96,), (96, 96), (96,), (64, 96), (64,)]
FRAGMENT = fragment_of(*SHAPES)
RANK, WARM_UP = 16, 4  # low rank starts after 4 rounds in int4, a quarter of the 16


def new_model() -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 64)
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.0
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    return model


def orthogonal(seed: int) -> Tensor:
    return torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))).Q


BASIS, TEACHER = orthogonal(1), orthogonal(2)
SIZES = 1 / torch.arange(1.0, 65)  # of the data's directions: without it all ranks would be full
SIZES *= 8 / SIZES.norm()


def loss(model: nn.Module, cluster: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100_000 * cluster + step)
    x = (torch.randn(32, 64, generator=generator) * SIZES) @ BASIS
    return (model(x) - torch.tanh(1.5 * x @ TEACHER)).square().mean()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def nesterov(means: list[Tensor]) -> list[Tensor]:
    """The outer steps for these means, fp64."""
    momentum = torch.zeros(means[0].numel(), dtype=torch.float64)
    steps: list[Tensor] = []
    for mean in means:
        momentum = MOMENTUM * momentum + mean.double()
        steps.append(LR * (mean.double() + MOMENTUM * momentum))
    return steps


@functools.cache
def recorded(num_clusters: int) -> list[list[Tensor]]:
    """Every cluster's pseudo-gradient of every round, and a check that training went somewhere."""
    anchor = flat(new_model())
    models = [new_model() for _ in range(num_clusters)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=2e-3) for m in models]
    rounds: list[list[Tensor]] = []
    losses: list[float] = []
    for round in range(NUM_ROUNDS):
        for cluster, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            nn.utils.vector_to_parameters(anchor.clone(), model.parameters())
            for step in range(H):
                optimizer.zero_grad()
                value = loss(model, cluster, round * H + step)
                value.backward()
                optimizer.step()
        losses.append(value.item())
        rounds.append([anchor - flat(model) for model in models])
        means = [exact_mean(values).float() for values in rounds]
        anchor = flat(new_model()) - sum(nesterov(means)).float()
    assert losses[-1] < 0.8 * losses[0]
    return rounds


def replayed(method: Compressor, num_clusters: int = 2) -> float:
    """The error of the total displacement."""
    clusters = Clusters(method, FRAGMENT, num_clusters)
    rounds = recorded(num_clusters)
    exact = sum(nesterov([exact_mean(values) for values in rounds]))
    return nmse(sum(nesterov([clusters.average(values) for values in rounds])), exact)


def low_rank(**fields: Any) -> LowRank:
    return LowRank(**{"rank": RANK, "min_saving": 1.0, "dense_rounds": WARM_UP, **fields})


@pytest.mark.parametrize("num_clusters", by_default([2, 4], 2))
def test_the_record_is_like_that_of_a_large_model(num_clusters: int) -> None:
    """Clusters agree in part, and the leading directions hold most, not all, of the energy."""
    for values in recorded(num_clusters):
        assert 0.5 < float(torch.cosine_similarity(values[0], values[1], dim=0)) < 0.99
        mean = exact_mean(values)
        for slot in FRAGMENT.layout:
            if len(slot.shape) == 2:
                part = mean[slot.offset : slot.offset + slot.numel].view(slot.shape)
                energies = torch.linalg.svdvals(part).square()
                assert 0.9 < energies[:RANK].sum() / energies.sum() < 0.99


@pytest.mark.parametrize("num_clusters", by_default([2, 4], 2))
@pytest.mark.parametrize(
    ("method", "limit"),
    [
        (Dense(), 1e-12),
        (Quantized(wire="int8"), 1e-3),
        (Quantized(error_feedback="fp32"), 1e-3),
        (Quantized(error_feedback="bf16"), 1e-3),
        (Quantized(error_feedback="int8"), 1e-3),
        (Quantized(), 0.02),
        (Quantized(mean_wire="int4"), 0.02),
        (Quantized(wire="fp4_e2m1"), 0.02),
        (Quantized(wire="ternary", error_feedback="fp32"), 0.01),
        (low_rank(), 0.01),
        (low_rank(error_feedback="bf16"), 0.01),
        (low_rank(factor_wire="int4"), 0.01),
    ],
    ids=str,
)
def test_the_displacement(method: Compressor, limit: float, num_clusters: int) -> None:
    assert replayed(method, num_clusters) <= limit


@pytest.mark.parametrize(
    ("method", "limit"),
    [
        (Quantized(), 1e-3),
        (Quantized(wire="ternary"), 0.02),
        (low_rank(error_feedback="none"), 0.01),
        (low_rank(rank=4), 0.01),
    ],
    ids=str,
)
def test_the_limits_tell_codecs_apart(method: Compressor, limit: float) -> None:
    """Without feedback, or at a rank that is too low, they are not met."""
    assert replayed(method) > limit


@pytest.mark.ci
def test_dense_rounds_first_and_in_between_help_a_low_rank() -> None:
    bare = replayed(low_rank(dense_rounds=0))
    assert replayed(low_rank()) < bare
    every_fifth = low_rank(dense_rounds=0, full_round_every=5)
    assert replayed(every_fifth) < 0.5 * bare
