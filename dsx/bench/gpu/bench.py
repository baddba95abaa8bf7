"""Goes through the checks that are asked for, and tells of each row as it comes."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from dsx.bench.gpu import checks
from dsx.bench.gpu.factors import factors
from dsx.bench.gpu.runs import Machine
from dsx.bench.gpu.table import Row


def machine_in_words() -> str:
    """Return what this ran on: GPUs, versions."""
    if not torch.cuda.is_available():
        return f"No GPU; torch {torch.__version__}, Python {platform.python_version()}."
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # pyright: ignore[reportAttributeAccessIssue]
    count = torch.cuda.device_count()
    return (
        f"{count} x {torch.cuda.get_device_name(0)}; torch {torch.__version__}, CUDA "
        f"{torch.version.cuda}, NCCL {nccl}, Python {platform.python_version()}."
    )


def check(
    asked: Sequence[str],
    folder: Path,
    gpus: int | None,
    at_once: int,
    on_cpu: bool,
    engines: Sequence[str],
    say: Callable[[str], None],
) -> list[Row]:
    """Return the rows of all checks; RuntimeError where there are not as many GPUs as asked for."""
    found = 0 if on_cpu else torch.cuda.device_count()
    if not on_cpu and not found:
        raise RuntimeError(
            "this machine has no GPU that torch can use; --on-cpu lets the clusters train on the "
            "CPU, which checks the command and nothing else"
        )
    if gpus is not None and gpus > found:
        raise RuntimeError(f"--gpus {gpus}: there are {found} here; give fewer, or leave it out")
    machine = Machine(gpus or found)
    rows: list[Row] = []
    places = {
        "copies": checks.copies, "codecs": checks.codecs, "factors": factors,
        "launches": checks.launches,
        "overhead": lambda: checks.own_cost(machine, folder),
        "trains": lambda: checks.trained(machine, folder, at_once, engines),
    }  # fmt: skip
    for name in asked:
        if on_cpu and name != "trains":
            rows.append(Row(name, "", "a GPU", "on the CPU", "not run"))
            continue
        rows += _told(places[name](), say)
    return rows


def _told(rows: Iterable[Row], say: Callable[[str], None]) -> list[Row]:
    kept: list[Row] = []
    for row in rows:
        kept.append(row)
        say(f"{row.outcome:7} {row.group}: {row.what}: {row.seen}")
    return kept
