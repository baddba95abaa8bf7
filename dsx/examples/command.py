"""`dsx quickstart`: a first run on this host, with nothing but what pip has installed."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import typer

import dsx
from dsx.core.one_line_errors import one_line_errors
from dsx.examples.arguments import pretraining_arguments, require_heads

_RANKS = 4
_DATA = "data/stdlib"
_SCRIPT = "dsx.examples.pretrain_gpt_deepspeed"
_CONFIG = Path(__file__).with_name("quickstart.json")


@one_line_errors("quickstart", ModuleNotFoundError)
def quickstart(context: typer.Context) -> None:
    """Train a small GPT across two clusters on this host.

    Each cluster has two ranks, with ZeRO-1 inside. They take 160 steps with the preset
    `recommended` on the sources of Python's own library: a few minutes on two CPU cores, or four
    GPUs where there are as many. Data goes to data/stdlib and results to runs/quickstart, below
    the current directory.

    Further options go to the training script: `dsx quickstart --steps 40`. It lists its own with
    `dsx quickstart -- --help`.
    """
    if find_spec("deepspeed") is None:
        raise ModuleNotFoundError(
            'needs DeepSpeed to train, which is not here: pip install "dsx-train[deepspeed]"'
        )
    if {"-h", "--help"} & set(context.args):
        _replace_process(["-m", _SCRIPT, "--help"], dict(os.environ))
    known = _require_known(context.args)
    require_heads(known.hidden, known.heads)
    from dsx.data.command import build

    build(["stdlib"], _DATA)
    launch = ["-m", "deepspeed.launcher.runner", "--num_gpus", str(_RANKS), "--module", _SCRIPT]
    launch += ["--deepspeed_config", str(_CONFIG), *context.args]
    _replace_process(launch, environment())


def _require_known(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what the script will read; ValueError for what it would refuse, before all else."""
    parser = dsx.add_launch_arguments(pretraining_arguments())
    for name in ("--deepspeed", "--deepscale"):  # DeepSpeed's own: it takes seconds to be asked
        parser.add_argument(name, action="store_true")
        parser.add_argument(f"{name}_config")

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"{message}; dsx quickstart -- --help lists what the script takes")

    parser.error = refuse
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        options = re.findall(r"--[\w-]+", parser.format_usage())
        near = difflib.get_close_matches(unknown[0], options, n=1)
        refuse(f"{unknown[0]} is not an option" + (f", did you mean {near[0]}?" if near else ""))
    return known


def environment() -> dict[str, str]:
    """Return that of the ranks: a device for each, or all of them on the CPU, one thread each."""
    found = {**os.environ, "OMP_NUM_THREADS": "1"}
    if _count_gpus() < _RANKS:
        found |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return found


def _count_gpus() -> int:
    """Ask the driver, without starting CUDA in this process."""
    if shutil.which("nvidia-smi") is None:
        return 0
    asked = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    return len(asked.stdout.splitlines()) if asked.returncode == 0 else 0


def _replace_process(arguments: list[str], environment: dict[str, str]) -> None:
    """Go on as Python with `arguments`: Ctrl-C and the exit status are the launcher's own."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *arguments], environment)
