"""The methods in plain torch, one loop, without dsx: the oracle of the other tests.

Written from the definitions: D = anchor - local (descent sign), the mean over clusters, an outer
rule, and a merge. Per parameter, no flat buffers, no threads, no hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Recipe:
    """What a method does, in the symbols of the papers."""

    fragments: Sequence[Sequence[str]]  # names of parameters
    interval: int  # H
    streaming: bool  # fragment p at offset floor((p+1) H / P) instead of all at H
    tau: int
    alpha: float  # weight of the anchor
    rule: str  # sgd | momentum | nesterov
    eta: float
    mu: float = 0.0


def train_reference(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    compute_loss: Callable[[nn.Module, int, int], Tensor],
    recipe: Recipe,
    num_clusters: int,
    num_steps: int,
    skipped: Sequence[tuple[int, int]] = (),
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return every cluster's parameters and the anchor after `num_steps` inner steps.

    `compute_loss(model, cluster, step)` gives the loss of one inner step (from 1); a pair
    `(cluster, step)` in `skipped` is an overflow step: counted, not taken.
    """
    models = [copy.deepcopy(model) for _ in range(num_clusters)]
    optimizers = [make_optimizer(m) for m in models]
    local = [dict(m.named_parameters()) for m in models]
    anchor = {n: p.detach().clone() for n, p in local[0].items()}
    buffer = {n: torch.zeros_like(p) for n, p in anchor.items()}
    in_flight: list[tuple[int, int, dict[str, Tensor]]] = []  # due step, fragment, mean D

    for step in range(1, num_steps + 1):
        for m, (net, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            compute_loss(net, m, step).backward()
            if (m, step) not in skipped:
                optimizer.step()
        with torch.no_grad():
            for p in _due(recipe, step):
                mean = {
                    n: sum(anchor[n] - theta[n] for theta in local) / num_clusters
                    for n in recipe.fragments[p]
                }
                in_flight.append((step + recipe.tau, p, mean))
            ripe = [entry for entry in in_flight if entry[0] == step]
            in_flight = [entry for entry in in_flight if entry[0] != step]
            for _, p, mean in ripe:
                for n in recipe.fragments[p]:
                    _outer_step(recipe, anchor[n], buffer[n], mean[n])
                    for theta in local:
                        theta[n].copy_((1 - recipe.alpha) * theta[n] + recipe.alpha * anchor[n])
    return [{n: p.detach().clone() for n, p in theta.items()} for theta in local], anchor


def _due(recipe: Recipe, step: int) -> list[int]:
    count = len(recipe.fragments)
    if not recipe.streaming:
        return list(range(count)) if step % recipe.interval == 0 else []
    offsets = [(p + 1) * recipe.interval // count for p in range(count)]
    return [
        p for p in range(count) if step >= offsets[p] and not (step - offsets[p]) % recipe.interval
    ]


def _outer_step(recipe: Recipe, anchor: Tensor, buffer: Tensor, mean: Tensor) -> None:
    if recipe.rule == "sgd":
        anchor -= recipe.eta * mean
        return
    buffer.copy_(recipe.mu * buffer + mean)
    if recipe.rule == "momentum":
        anchor -= recipe.eta * buffer
    else:
        anchor -= recipe.eta * (mean + recipe.mu * buffer)
