"""What the example scripts share: counting, progress on the terminal, and the end of a run.

Losses are in nats per token; bytes are payload that one cluster sent to the others. Utilization is
1 - blocked / elapsed: blocked is the time that training threads spent inside dsx (copying, outer
steps, waiting for other clusters; each step counts its slowest rank), elapsed the wall time.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import dsx
from dsx.telemetry.report import report


@dataclass(frozen=True)
class Counters:
    """What one cluster did over some steps."""

    steps: int = 0
    loss_sum: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    blocked_seconds: float = 0.0
    bytes_sent: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def loss(self) -> float:
        """Return the mean training loss."""
        return self.loss_sum / self.steps

    @property
    def tokens_per_second(self) -> float:
        """Return the speed of the whole cluster."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def utilization(self) -> float:
        """Return the share of the time in which dsx did not hold up training."""
        return 1 - self.blocked_seconds / self.seconds if self.seconds else 1.0

    def record(self) -> dict[str, float]:
        """Return what belongs into the record of a step."""
        names = ("loss", "tokens", "tokens_per_second", "blocked_seconds", "utilization")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        speed = f"{self.tokens_per_second:,.0f} tokens/s  util {self.utilization:.1%}"
        return f"loss {self.loss:.3f}  {speed}"


@dataclass(frozen=True)
class Results:
    """What the end of a run knows; tuples have one entry per cluster."""

    val_losses: Sequence[float]
    val_loss_average: float
    tokens_per_second: Sequence[float]
    utilization: Sequence[float]
    bytes_sent: Sequence[int]
    unigram_entropy: float
    started: float  # time.perf_counter


class Meter:
    """Counts one cluster's progress; every call is one small collective over its ranks."""

    def __init__(self, handle: dsx.Handle, num_data_ranks: int, device: torch.device) -> None:
        self._handle = handle
        self._num_data_ranks = num_data_ranks
        self._ranks = torch.zeros(dist.get_world_size(), 3, device=device).double()
        # bytes count from 0: the first step of a resumed run brings what was sent before
        self._last = (time.perf_counter(), self._handle.totals.blocked_seconds, 0)

    def count(self, steps: int = 0, loss: float = 0.0, tokens: int = 0) -> Counters:
        """Return what happened since the last call: `loss` and `tokens` are this rank's."""
        totals = self._handle.totals
        now = (time.perf_counter(), totals.blocked_seconds, totals.bytes_sent)
        seconds, blocked, sent = (b - a for a, b in zip(self._last, now, strict=True))
        self._last = now
        self._ranks.zero_()[dist.get_rank()] = self._ranks.new_tensor([loss, blocked, sent])
        dist.all_reduce(self._ranks)
        losses, blocked, sent = self._ranks.T.tolist()
        return Counters(
            steps=steps,
            loss_sum=steps * sum(losses) / len(losses),
            tokens=tokens * self._num_data_ranks,
            seconds=seconds,
            blocked_seconds=max(blocked),
            bytes_sent=int(sum(sent)),
        )


def set_aside(directory: Path) -> None:
    """Rename an earlier run's checkpoints: --resume must not take them for this run's."""
    if directory.exists():
        shutil.rmtree(f"{directory}.old", ignore_errors=True)
        directory.rename(f"{directory}.old")


def open_bar(console: Console | None) -> Progress:
    """Return a live bar, disabled where the output is not a terminal."""
    columns = (MofNCompleteColumn(), BarColumn(bar_width=8), TimeRemainingColumn())
    text = TextColumn("{task.description}")
    return Progress(*columns, text, console=console, disable=not (console and console.is_terminal))


def conclude_run(
    handle: dsx.Handle, console: Console | None, run_dir: Path, results: Results, model_bytes: int
) -> None:
    """Write and show the results, on the ranks that have a console."""
    if console is None:
        return
    own, average = results.val_losses[handle.cluster_id], results.val_loss_average
    if handle.cluster_id:
        losses = f"own {own:.4f}, average of the clusters {average:.4f}"
        console.print(f"validation loss: {losses}; cluster 0 writes summary and figure")
        return
    num_clusters = handle.num_clusters
    ring_bytes = 2 * (num_clusters - 1) * model_bytes // num_clusters  # of an all-reduce
    summary = {
        "steps": handle.step,
        "tokens_per_second": sum(results.tokens_per_second),
        "utilization": sum(results.utilization) / num_clusters,
        "bytes_sent": max(results.bytes_sent),
        "bytes_sent_synchronous": handle.step * ring_bytes,
        "val_loss_clusters": results.val_losses,
        "val_loss_average": average,
        "unigram_entropy": results.unigram_entropy,
        "wall_seconds": time.perf_counter() - results.started,
    }
    try:
        (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        report(run_dir)
    except (OSError, ValueError) as error:  # the model is trained and saved: nothing ends by this
        console.print(f"no report of the run: {error}; its results: {json.dumps(summary)}")
