"""Pseudo-gradients of the quickstart's model on real text, for `dsx bench codec` to measure on.

Two clusters in one process train from the same weights with DiLoCo, H = 20; what cluster 0 would
send at the end of the last round is saved by parameter name.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import dsx
from dsx.core.progress import SOON, Progress, as_count
from dsx.data import ClusterBatches, TokenWindows, read_summary
from dsx.examples.gpt import GPT, GPTConfig

NUM_CLUSTERS, INTERVAL, BATCH_SIZE = 2, 20, 4


def save_pseudo_gradients(data: Path, out: Path, num_rounds: int) -> None:
    """Train `num_rounds` rounds on a dataset, and write the last round's to `out`."""
    config = GPTConfig(sequence_length=128, vocab_size=read_summary(data).vocab_size)
    windows = TokenWindows(data / "train", config.sequence_length)
    batches = [
        ClusterBatches(
            windows, BATCH_SIZE, cluster_id=m, num_clusters=NUM_CLUSTERS,
            rank=0, world_size=1, seed=0,
        )
        for m in range(NUM_CLUSTERS)
    ]  # fmt: skip
    model = GPT(config, 0)
    models = [copy.deepcopy(model) for _ in range(NUM_CLUSTERS)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1.5e-3, betas=(0.9, 0.95)) for m in models]
    method = dsx.preset("diloco", NUM_CLUSTERS, schedule={"interval": INTERVAL})
    clusters = dsx.SimulatedClusters(models, optimizers, method)
    start = weights(models[0])
    sent: dict[str, torch.Tensor] = {}
    num_steps = num_rounds * INTERVAL
    progress = Progress("steps", num_steps, True, first_seconds=SOON, shown=as_count)
    for step in range(1, num_steps + 1):
        for own, optimizer, source in zip(models, optimizers, batches, strict=True):
            tokens = next(source)
            optimizer.zero_grad()
            own(tokens[:, :-1], tokens[:, 1:]).backward()
            nn.utils.clip_grad_norm_(own.parameters(), 1.0)
            optimizer.step()
        if step % INTERVAL == 0:
            sent = {name: start[name] - now for name, now in weights(models[0]).items()}
        clusters.step()
        if step % INTERVAL == 0:
            start = weights(models[0])
        progress.moved(1)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(sent, str(out))
    norm = sum(float(d.square().sum()) for d in sent.values()) ** 0.5
    numel = sum(d.numel() for d in sent.values())
    print(f"{numel:,} values of round {num_rounds}, norm {norm:.3f}: {out}")


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the trained parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}
