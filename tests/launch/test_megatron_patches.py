"""`python -m megatron_patches`: its help, what it refuses, and its old spelling; no tree needed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed import free_port

ROOT = Path(__file__).parents[2]
FLAGS = ["--dsx-preset", "diloco", "--dsx-num-clusters", "2"]


def run(*arguments: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *map(str, arguments)], env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), ([], 2)])
def test_its_own_help(arguments: Sequence[str], status: int) -> None:
    done = run("-m", "megatron_patches", *arguments)
    assert done.returncode == status
    assert done.stdout.startswith("usage: python -m megatron_patches SCRIPT [--dsx-... VALUE]")
    assert "--dsx-schedule-interval" in done.stdout and "--dsx-num-clusters" in done.stdout
    assert done.stderr == ""


def test_its_own_help_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys; from megatron_patches.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print({'torch', 'megatron'} & {*sys.modules})"
    )
    assert run("-c", code).stdout.splitlines()[-1] == "set()"


def test_a_missing_script_is_named() -> None:
    done = run("-m", "megatron_patches", "no_such.py", *FLAGS)
    assert done.returncode == 2
    assert done.stderr.startswith("megatron_patches: no script at no_such.py; give one that is")


def test_a_flag_that_is_wrong_ends_it_with_one_line(tmp_path: Path) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("raise SystemExit('it ran')\n")
    done = run("-m", "megatron_patches", script, *FLAGS, "--dsx-deadline-seconds", "Infinity")
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line == (
        "megatron_patches: dsx.clusters.deadline_seconds=inf must be a finite number of at least "
        "0.001 and at most 30,000,000; leave it out for 600.0"
    )


@pytest.mark.ci
def test_the_old_spelling_works_and_names_the_new_one() -> None:
    done = run("-m", "dsx.megatron", "--help")
    assert done.returncode == 0
    assert done.stdout == run("-m", "megatron_patches", "--help").stdout
    (warning,) = [line for line in done.stderr.splitlines() if "Warning" in line]
    assert "python -m dsx.megatron is now python -m megatron_patches" in warning


def test_a_module_imports_the_old_one_with_one_warning() -> None:
    code = "import dsx.megatron, megatron_patches.__main__ as new; "
    done = run("-c", code + "print(dsx.megatron.main is new.main)")
    assert done.stdout == "True\n" and done.stderr.count("RenamedWarning") == 1


@pytest.mark.ci
def test_under_torchrun_a_tree_that_is_not_there_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("raise SystemExit('it ran without its patches')\n")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--master-port", str(free_port()), "-m", "megatron_patches"]
    done = run(*launcher, script, *FLAGS)
    assert done.returncode != 0
    assert "megatron_patches: no module megatron.training.arguments: put the Megatron-LM" in (
        done.stderr
    )
    assert "it ran without" not in done.stderr
