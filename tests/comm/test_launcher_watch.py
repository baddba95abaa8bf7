"""Which process is taken for a rank's launcher: by what it runs, not by a word in its arguments."""

from __future__ import annotations

import os

import pytest

from dsx.comm import launcher_watch
from dsx.comm.launcher_watch import launcher_processes, program_of


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("/env/bin/python /env/bin/torchrun --nproc-per-node 2 train.py", "torchrun"),
        ("python3.11 -u -m torch.distributed.run -m dsx.run x.py", "torch.distributed.run"),
        ("python -um torch.distributed.run x.py", "torch.distributed.run"),
        ("python -W ignore -X faulthandler -Wonce /bin/accelerate launch x.py", "accelerate"),
        ("python -c import_accelerate", ""),
        ("bash /home/accelerate/run_torchrun.sh accelerate", "bash"),
        ("python my_accelerate.py --with torchrun", "my_accelerate.py"),
        ("python", ""),
        ("", ""),
    ],
)
def test_the_program_of_a_command(command: str, program: str) -> None:
    assert program_of(command.split()) == program


@pytest.mark.parametrize(
    ("parent", "above", "count"),
    [
        ("python -u -m deepspeed.launcher.launch x.py", "python /bin/deepspeed x.py", 2),
        ("python -u -m deepspeed.launcher.launch x.py", "bash deepspeed.sh", 1),
        ("python /bin/accelerate launch x.py", "bash", 1),
        ("bash launch_with_accelerate.sh", "python /bin/deepspeed x.py", 0),
        ("python -m pytest tests/deepspeed", "bash", 0),
    ],
)
def test_launchers_are_those_that_start_ranks(
    parent: str, above: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = {os.getppid(): parent.split(), 7: above.split()}
    monkeypatch.setattr(launcher_watch, "_command", lambda pid: of[pid])
    monkeypatch.setattr(launcher_watch, "_parent_of", lambda pid: 7)
    assert len(launcher_processes()) == count
