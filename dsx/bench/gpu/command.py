"""`dsx bench gpu` on the command line.

dsx bench gpu --out gpu_check
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dsx.core.one_line_errors import one_line_errors

ENGINES = (
    "torch", "torch_ddp", "torch_fsdp2", "deepspeed_zero0", "deepspeed_zero1", "deepspeed_zero2",
    "deepspeed_zero3", "megatron", "megatron_distributed", "torch_apex",
)  # fmt: skip
CHECKS = ("copies", "codecs", "factors", "launches", "overhead", "trains")


@one_line_errors("bench gpu", RuntimeError)
def gpu(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Table, JSON and logs.")] = Path(
        "gpu_check"
    ),
    only: Annotated[
        str | None, typer.Option(metavar="NAME,NAME", help=f"Of {', '.join(CHECKS)}.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Of this machine's, 1 to 8; default: all.", min=1, max=8)
    ] = None,
    at_once: Annotated[
        int, typer.Option(help="Runs of two clusters side by side, while they train.", min=1)
    ] = 6,
    engines: Annotated[
        str | None, typer.Option(metavar="NAME,NAME", help="That train; default: all there are.")
    ] = None,
    on_cpu: Annotated[
        bool, typer.Option("--on-cpu", help="Only train, on the CPU: to see the command work.")
    ] = False,
) -> None:
    """Check what only a machine with GPUs can show: minutes, and a table in Markdown.

    Every preset and engine trains in two clusters, NCCL inside and host links between; on a single
    GPU both share it. Counted are places where dsx makes the host wait for the device, its memory
    against the plan, its share of a step, and the codecs' speed on the device, on which low rank
    comes to the host's bits beside training.
    """
    from rich.console import Console

    from dsx.bench.gpu.bench import check, machine_in_words
    from dsx.bench.gpu.table import as_markdown

    asked = CHECKS if only is None else tuple(name.strip() for name in only.split(","))
    if wrong := [name for name in asked if name not in CHECKS]:
        raise ValueError(f"--only has {wrong[0]!r}; it takes {', '.join(CHECKS)}")
    trained = ENGINES if engines is None else tuple(name.strip() for name in engines.split(","))
    if wrong := [name for name in trained if name not in ENGINES]:
        raise ValueError(f"--engines has {wrong[0]!r}; it takes {', '.join(ENGINES)}")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out {out} holds files already; give a folder that is new or empty")
    out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, stderr=True)
    rows = check(
        asked, out, gpus, at_once, on_cpu, trained,
        lambda line: console.print(line, markup=False, soft_wrap=True),
    )  # fmt: skip
    text = as_markdown(rows, machine_in_words())
    (out / "gpu_check.md").write_text(text)
    (out / "gpu_check.json").write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    typer.echo(text)
    if any(row.outcome == "failed" for row in rows):
        raise typer.Exit(1)
