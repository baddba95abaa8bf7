"""What ranks of tests are forked from: engines are there, ranks are as a launcher's otherwise."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import forked_commands, templates
from tests.distributed import free_port, run_distributed
from tests.forked_commands import start_command


def look_around(module: str, caller: int) -> dict[str, Any]:
    return {
        "is_imported": module in sys.modules,
        "threads": threading.active_count(),
        "is_initialized": dist.is_initialized(),
        "hash": hash("dsx"),
        "environment": [os.environ[name] for name in ("RANK", "WORLD_SIZE", "DSX_OF_THE_TEST")],
        "is_child": os.getppid() == caller,
    }


@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
def test_ranks_start_with_an_engine_and_nothing_else(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")
    module = {"deepspeed": "deepspeed", "megatron": "megatron.core.parallel_state"}[engine]
    for told in ("first", "second"):
        monkeypatch.setenv("DSX_OF_THE_TEST", told)
        found = run_distributed(look_around, 4, module, os.getpid(), engine=engine)
        for rank, seen in enumerate(found):
            assert seen["is_imported"] and not seen["is_initialized"] and not seen["is_child"]
            assert seen["environment"] == [str(rank), "4", told]
            assert seen["threads"] <= 2  # its own, and that of the queue it answers with
        hashes = [seen["hash"] for seen in found]
        assert hashes[0] != hashes[1] and hashes[0] != hashes[2] and hashes[3] != hashes[1]


@pytest.mark.ci
def test_a_rank_may_be_an_interpreter_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSX_OF_THE_TEST", "own")
    found = run_distributed(look_around, 2, "deepspeed", os.getpid(), engine=None)
    assert [seen["is_imported"] for seen in found] == [False, False]
    assert all(seen["is_child"] for seen in found)


def test_templates_are_lent_and_what_is_forked_prints_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(templates.PRELOADS, "small", "json")
    with capfd.disabled():  # where the templates print
        lender = templates.lend_templates()
        first, second = (templates._borrowed("small", lender) for _ in range(2))
    try:
        addresses = [server._forkserver_address for server in first]
        assert addresses == [server._forkserver_address for server in second]
        assert addresses[0] != addresses[1]
        monkeypatch.setitem(templates._started, "small", second)
        for rank in range(2):
            process = templates.ForkedRank("small", rank, target=print, args=(f"rank {rank}",))
            process.start()
            process.join()
            assert process.exitcode == 0
    finally:
        for server in (*first, *second):  # or the templates would not end
            os.close(server._forkserver_alive_fd)
    assert capfd.readouterr().out == "rank 0\nrank 1\n"


SAYS = """\
import os, sys
said = [os.environ["RANK"], os.getcwd(), *sys.argv[1:], "deepspeed" in sys.modules, os.getppid()]
print(*said, file=open(f"said.{os.environ['RANK']}", "w"))
print(f"rank {os.environ['RANK']}")
sys.exit(int(os.environ["RANK"]) * 3)
"""


@pytest.mark.ci
def test_ranks_of_torchrun_are_forked_and_are_its_children(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    if not forked_commands._can_be_shown():
        pytest.skip("commands are not forked here")
    (tmp_path / "says.py").write_text(SAYS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "--master-port", str(free_port()), "says.py", "--told"]
    log = tmp_path / "log"
    process = start_command(command, log, dict(os.environ), folder=tmp_path)
    assert process.wait(120) == 1, log.read_text()
    for rank in range(2):
        said = (tmp_path / f"said.{rank}").read_text().split()
        assert said == [str(rank), str(tmp_path), "--told", "True", str(process.pid)]
    assert "rank 0\n" in log.read_text() and "exitcode  : 3 " in log.read_text()
