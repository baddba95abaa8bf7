"""One run of a convergence study: a preset, or the data-parallel baseline, on a problem."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

import dsx
from dsx.bench.convergence.adaptive import Adaptive
from dsx.bench.convergence.figures import perplexity
from dsx.bench.convergence.growing import growing_intervals
from dsx.bench.convergence.guard import GuardRecord
from dsx.bench.convergence.inner import Batch, begin_step, end_step, make_optimizers, take_step
from dsx.bench.convergence.problems import PROBLEMS
from dsx.bench.convergence.tail import TailMean
from dsx.bench.convergence.task import (
    BASELINE,
    OUTER_BASELINE,
    Study,
    Task,
    evaluation_steps,
    inner_rate,
    overrides,
    warmup_steps,
)
from dsx.bench.convergence.together import (
    share_all,
    share_moments,
    share_moments_coded,
    share_rest,
    share_slow,
    shared_bytes,
)
from dsx.data import ClusterBatches
from dsx.method.changes import INTERVAL

_SLOW_PART = 0.5  # of Muon's slow momentum in an update, with +slow
_EACH_ROUND = {
    "moments": share_moments, "moments_2bit": share_moments_coded, "slow": share_slow
}  # fmt: skip


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[Batch]) -> tuple[float, float]:
    """Return loss and accuracy on held-out batches, per prediction."""
    model.eval()
    loss_sum = right = count = 0.0
    for inputs, targets in batches:
        logits = model(inputs).flatten(0, -2).float()
        targets = targets.flatten()
        counted = int((targets >= 0).sum())
        loss_sum += nn.functional.cross_entropy(logits, targets).item() * counted
        right += int((logits.argmax(-1) == targets).sum())
        count += counted
    model.train()
    return loss_sum / count, right / count


def run_task(study: Study, task: Task) -> dict[str, Any]:
    """Train one preset, or the baseline, and return its result."""
    started = time.perf_counter()
    study = task.own.applied(study)
    torch.manual_seed(task.seed)
    device = torch.device(study.device)
    problem = PROBLEMS[study.problem]
    model = problem.make_model(study, task.seed).to(device)
    train, held_out = problem.read(study)
    count = min(study.validation_windows, len(held_out))
    chosen = torch.stack([held_out[i * len(held_out) // count] for i in range(count)])

    def batch_of(rows: Tensor) -> Batch:
        return problem.inputs_and_targets(study, rows.to(device))

    validation = [batch_of(part) for part in chosen.split(32)]
    batches = [
        ClusterBatches(
            train,
            study.batch_size,
            cluster_id=m,
            num_clusters=study.num_clusters,
            rank=0,
            world_size=1,
            seed=task.seed,
            shards=study.shards,
        )
        for m in range(study.num_clusters)
    ]
    step_batches = ([batch_of(next(b)) for b in batches] for _ in range(study.num_steps))
    if task.preset == BASELINE:
        result = train_baseline(study, task, model, step_batches, validation)
    elif task.preset == OUTER_BASELINE:
        result = train_outer_baseline(study, task, model, step_batches, validation)
    else:
        result = train_preset(study, task, model, step_batches, validation)
    return {
        "preset": task.preset,
        "seed": task.seed,
        "lr": task.lr,
        "momentum": task.momentum,
        "own": asdict(task.own),
        **result,
        "parameters": sum(p.numel() for p in model.parameters()),
        "perplexity": perplexity(result["val_loss"]),
        "seconds": time.perf_counter() - started,
    }


def divergence(models: Sequence[nn.Module]) -> float:
    """Return the mean distance of the models to their average, relative to the average's norm.

    DreamDDP (arXiv:2502.11058, Sec. 3) has the squared distances, in the parameters' own units.
    """
    flat = [nn.utils.parameters_to_vector(model.parameters()).detach() for model in models]
    average = torch.stack(flat).mean(0)
    distances = [float((own - average).norm()) for own in flat]
    return sum(distances) / len(distances) / float(average.norm())


def prepare(study: Study, models: Sequence[nn.Module]) -> None:
    """Compile the models where the study asks for it; they share what is compiled."""
    if study.compiled:
        for model in models:
            model.compile(dynamic=False)  # pyright: ignore[reportUnknownMemberType]


def ring_bytes(study: Study, model: nn.Module) -> int:
    """Return what one all-reduce of fp32 gradients around a ring takes a cluster to send."""
    num_bytes = sum(4 * p.numel() for p in model.parameters())
    return 2 * (study.num_clusters - 1) * num_bytes // study.num_clusters


def joined(parts: Sequence[Batch]) -> Batch:
    """Return the clusters' batches of a step as one."""
    inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
    return inputs, targets


def train_baseline(
    study: Study,
    task: Task,
    model: nn.Module,
    batches: Iterator[list[Batch]],
    validation: Sequence[Batch],
) -> dict[str, Any]:
    """Synchronous data parallel: every step takes the mean gradient of all clusters' batches."""
    optimizers = make_optimizers(model, study)
    prepare(study, [model])
    ring = ring_bytes(study, model)
    curve: list[tuple[int, float, int]] = []
    accuracy, tail = 0.0, TailMean(study)
    for step, parts in enumerate(batches, start=1):
        take_step(model, optimizers, joined(parts), inner_rate(study, step))
        tail.note(step, [model])
        if step in evaluation_steps(study):
            loss, accuracy = evaluate(model, validation)
            curve.append((step, loss, ring * step))
    return {
        "val_loss": curve[-1][1], "accuracy": accuracy, "curve": curve,
        "tail_loss": evaluate(tail.model(model), validation)[0],
        "bytes_per_cluster": ring * study.num_steps, "average_bytes": 0, "hidden_percent": 0.0,
        "syncs": study.num_steps, "divergence": 0.0, "settings": {},
    }  # fmt: skip


def train_outer_baseline(
    study: Study,
    task: Task,
    model: nn.Module,
    batches: Iterator[list[Batch]],
    validation: Sequence[Batch],
) -> dict[str, Any]:
    """Data parallel with an outer Nesterov step every H, which nobody has to wait for.

    SNOO (Kallusky et al., arXiv:2510.15830): `diloco` of one cluster that has all batches.
    """
    alone = replace(study, num_clusters=1)
    whole = ([joined(parts)] for parts in batches)
    result = train_preset(alone, replace(task, preset="diloco"), model, whole, validation)
    ring = ring_bytes(study, model)
    curve = [(step, loss, ring * step) for step, loss, _ in result["curve"]]
    return {**result, "curve": curve, "bytes_per_cluster": ring * study.num_steps}


def take_steps(
    study: Study,
    step: int,
    models: Sequence[nn.Module],
    optimizers: Sequence[Sequence[torch.optim.Optimizer]],
    parts: Sequence[Batch],
    variants: Sequence[str],
) -> int:
    """Take one inner step of every cluster; return the elements shared beside the method."""
    shared = 0
    for own, its, part in zip(models, optimizers, parts, strict=True):
        begin_step(own, its, part)
    if "begun" in variants and step <= warmup_steps(study):
        shared += share_all(optimizers)
    elif "embeddings" in variants:
        shared += share_rest(optimizers)
    for own, its in zip(models, optimizers, strict=True):
        end_step(own, its, inner_rate(study, step))
    if step % study.interval == 0:
        for variant, share in _EACH_ROUND.items():
            shared += share(optimizers) if variant in variants else 0
    return shared


def train_preset(
    study: Study,
    task: Task,
    model: nn.Module,
    batches: Iterator[list[Batch]],
    validation: Sequence[Batch],
) -> dict[str, Any]:
    """C clusters under a preset; the loss is that of the model a finished run hands out.

    Clusters' distances to their average are taken before the boundary, ten times a period.
    """
    axes = overrides(study, task)
    preset, *variants = task.preset.split("+")
    method = dsx.preset(preset, study.num_clusters, **axes)
    models = [copy.deepcopy(model) for _ in range(study.num_clusters)]
    slow = _SLOW_PART if "slow" in variants else 0.0
    optimizers = [make_optimizers(m, study, slow) for m in models]
    prepare(study, models)
    hidden = [0] * study.num_clusters  # bytes that travelled while training went on
    guard, adaptive = GuardRecord(), Adaptive(variants, task.lr or 1.0, study.interval)

    def note(cluster: int, event: Mapping[str, Any]) -> None:
        if cluster == 0:
            guard.note(event)
            adaptive.note(event)
        if event["applied_step"] > event["launched_step"]:
            hidden[cluster] += event["bytes_sent"]

    clusters = dsx.SimulatedClusters(models, optimizers, method, on_sync=note)
    curve, distances = list[tuple[int, float, int]](), list[float]()
    sent = evaluated = average = shared = 0  # shared: elements, beside the method
    accuracy, tail = 0.0, TailMean(study)
    intervals = growing_intervals(study) if "growing" in variants else ()
    for step, parts in enumerate(batches, start=1):
        shared += take_steps(study, step, models, optimizers, parts, variants)
        if step % max(1, method.schedule.interval // 10) == 0:
            distances.append(divergence(models))
        changed = {INTERVAL: intervals[step - 1]} if "growing" in variants else adaptive.changed()
        for loop in clusters.loops:
            loop.history.changed.update(changed)
        clusters.step()
        if step == study.num_steps:
            clusters.finish()
        tail.note(step, models)
        sent = max(clusters.bytes_sent) - evaluated + shared_bytes(shared, study.num_clusters)
        if step in evaluation_steps(study):
            with clusters.averaged() as finished:  # where that takes a mean, it is sent, too
                loss, accuracy = evaluate(finished, validation)
            curve.append((step, loss, sent))
            before = evaluated + sent - shared_bytes(shared, study.num_clusters)
            average = max(clusters.bytes_sent) - before  # of the last one, at the end
            evaluated += average
    fragments = len(clusters.loops[0].adapter.fragments)  # syncs are of whole models
    return {
        "val_loss": curve[-1][1], "accuracy": accuracy, "curve": curve, "bytes_per_cluster": sent,
        "tail_loss": evaluate(tail.model(models[0]), validation)[0],
        "average_bytes": average, "hidden_percent": 100 * max(hidden) / max(1, sent + average),
        "syncs": clusters.num_syncs / fragments, "settings": axes,
        "divergence": sum(distances) / max(1, len(distances)), "guard": guard.summary(),
    }  # fmt: skip
