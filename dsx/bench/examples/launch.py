"""A row's script under torchrun: with `-m dsx.run` in its place, or by itself, with a deadline."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dsx
from dsx.bench.examples.table import Row
from dsx.bench.free_ports import free_ports

_INSIDE = Path(__file__).with_name("inside")
_POLL_SECONDS = 0.2


class RowFailed(RuntimeError):
    """A run of a row has ended with an error, or not in time, or what it left is wrong."""


@dataclass(frozen=True)
class Launched:
    """A run that has ended well: the command, where it wrote, what it printed, and its seconds."""

    command: tuple[str, ...]
    out: Path
    printed: str
    seconds: float

    @property
    def as_typed(self) -> str:
        """The command as a shell takes it."""
        return shlex.join(self.command)


def launch(
    row: Row, tree: Path, data: Path, out: Path, with_dsx: bool, deadline_seconds: float,
    tell: Callable[[float], None] = lambda seconds: None,
) -> Launched:  # fmt: skip
    """Run a row's script once; RowFailed if it does not end well before the deadline.

    Without dsx it is one world of the ranks of all clusters. `tell(seconds)` is called meanwhile.
    """
    out.mkdir(parents=True)
    (out / "notes").mkdir()
    command = _command(row, tree, data, out, with_dsx)
    log, begun = out / "printed.txt", time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=_place(row, tree, data),
            env=_environment(row, tree, data, out, with_dsx), start_new_session=True,
        )  # fmt: skip
    try:
        while process.poll() is None:
            seconds = time.monotonic() - begun
            if seconds > deadline_seconds:
                raise RowFailed(f"has not ended within {deadline_seconds:g} s (--timeout); {log}")
            tell(seconds)
            time.sleep(_POLL_SECONDS)
    finally:
        _end(process)
    printed = log.read_text(errors="replace")
    if process.returncode:
        raise RowFailed(f"ended with status {process.returncode}: {reason(printed)}; see {log}")
    return Launched(tuple(command), out, printed, time.monotonic() - begun)


def _command(row: Row, tree: Path, data: Path, out: Path, with_dsx: bool) -> list[str]:
    block = {
        **row.method,
        "clusters": {"num_clusters": row.clusters},
        "metrics": {"dir": str(out / "run")},
    }
    before: list[str] = []
    if row.deepspeed is not None:
        plain = dict(row.plain_deepspeed or row.deepspeed)
        _write(out / "ds.json", {**row.deepspeed, "dsx": block} if with_dsx else plain)
    elif with_dsx:
        before = ["--dsx-config", str(_write(out / "dsx.json", {"dsx": block}))]
    script = ["-m", row.script] if row.is_module else [str(tree / row.script)]
    replaced = _replaced_in(row, data, out, with_dsx)
    arguments = [_replaced(argument, replaced) for argument in row.arguments]
    started = ["-m", "dsx.run", *before, *script] if with_dsx else script
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node",
        str(row.clusters * row.ranks),
        "--master-port", str(*free_ports(1)), *started, *arguments,
    ]  # fmt: skip


def _write(file: Path, content: dict[str, Any]) -> Path:
    file.write_text(json.dumps(content, indent=1))
    return file


def _replaced_in(row: Row, data: Path, out: Path, with_dsx: bool) -> dict[str, str]:
    """Return what stands for what in a row's arguments and variables."""
    world = row.ranks if with_dsx else row.clusters * row.ranks
    return {
        "{data}": str(data), "{out}": str(out), "{json}": str(out / "ds.json"),
        "{ranks}": str(world), "{accumulation}": str(2 * world),
        **({} if with_dsx else {"{cluster_id}": "all"}),
    }  # fmt: skip


def _replaced(text: str, by: dict[str, str]) -> str:
    for name, value in by.items():
        text = text.replace(name, value)
    return text


def _place(row: Row, tree: Path, data: Path) -> Path:
    return tree / row.directory if row.directory else data


def _environment(row: Row, tree: Path, data: Path, out: Path, with_dsx: bool) -> dict[str, str]:
    """Return that of a machine without a network, a GPU, or variables of dsx."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("DSX_", "EXAMPLES_"))}
    replaced = _replaced_in(row, data, out, with_dsx)
    environ = row.environ if with_dsx or row.plain_environ is None else row.plain_environ
    paths = [str(_INSIDE), str(Path(dsx.__file__).parents[1])]
    paths += [str(tree)] if row.is_module else []
    paths += [kept["PYTHONPATH"]] if kept.get("PYTHONPATH") else []
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_EVALUATE_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HOME": str(out / "hf"),
        "WANDB_MODE": "disabled",
        "EXAMPLES_NOTES": str(out / "notes"),
        "EXAMPLES_SHIM": row.shim,
        **{name: _replaced(value, replaced) for name, value in environ.items()},
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher and its ranks, whatever they do."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, sent)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            continue


def reason(printed: str) -> str:
    """Return the line that says most: what dsx.run refused, C++'s end, or a first exception."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    refused = [line for line in lines if line.startswith(("dsx.run:", "terminate called"))]
    raised = [line for line in lines if "Error: " in line and "ChildFailedError" not in line]
    return (refused or raised or lines or ["nothing printed"])[0]
