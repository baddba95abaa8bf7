"""On how many cores a rank codes, by its mask, its container and the ranks beside it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import dsx
from dsx.comm.gloo import GlooTransport
from dsx.comm.rendezvous import Rendezvous
from dsx.config.schema import DsxConfig, load_config
from dsx.core.cores import CodingCores
from dsx.engines.torch import TorchAdapter
from dsx.training.coding import cores_here, resources_of
from tests.distributed import free_port, run_distributed
from tests.tiny import TinyNet

ROOT = Path(__file__).parents[2]
OWN, LAUNCHER = range(12), range(96)


def config(preset: str = "diloco", **coding: Any) -> DsxConfig:
    block = {"preset": preset, "clusters": {"num_clusters": 2}, "coding": coding}
    return load_config({"dsx": block})


@pytest.fixture
def on_a_large_host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A rank of eight, with the mask of the launcher: 96 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*LAUNCHER})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    return monkeypatch


def budget_of(config: DsxConfig, num_fragments: int) -> CodingCores:
    """The budget of a rank whose outer state is on the CPU."""
    model = TinyNet(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    adapter = TorchAdapter(model, optimizer, config.method.fragments)
    cores = resources_of(config, adapter)(num_fragments).cores
    assert cores is not None
    return cores


def bind(monkeypatch: pytest.MonkeyPatch, cores: range) -> None:
    """Let the rank have a mask of its own."""
    by_process = {0: {*cores}, os.getppid(): {*LAUNCHER}}
    monkeypatch.setattr(os, "sched_getaffinity", by_process.__getitem__)


def test_ranks_with_the_launchers_mask_share_it(on_a_large_host: pytest.MonkeyPatch) -> None:
    assert cores_here(Path("none")) == (96, 8)
    on_a_large_host.delenv("LOCAL_WORLD_SIZE")
    assert cores_here(Path("none")) == (96, 1)


def test_a_rank_that_is_bound_to_cores_has_those_alone(
    on_a_large_host: pytest.MonkeyPatch,
) -> None:
    bind(on_a_large_host, OWN)
    assert cores_here(Path("none")) == (12, 1)


@pytest.mark.parametrize(("cores", "ranks"), [(48, 4), (24, 2), (4, 1)])
def test_ranks_that_are_bound_to_a_numa_node_share_it(
    on_a_large_host: pytest.MonkeyPatch, cores: int, ranks: int
) -> None:
    bind(on_a_large_host, range(cores))
    assert cores_here(Path("none")) == (cores, ranks)


def test_a_launcher_that_is_bound_itself_makes_no_more_ranks_of_its_own(
    on_a_large_host: pytest.MonkeyPatch,
) -> None:
    by_process = {0: {*LAUNCHER}, os.getppid(): {0}}
    on_a_large_host.setattr(os, "sched_getaffinity", by_process.__getitem__)
    assert cores_here(Path("none")) == (96, 8)


@pytest.mark.parametrize(
    ("name", "value", "ranks"),
    [
        ("LOCAL_SIZE", "4", 4), ("OMPI_COMM_WORLD_LOCAL_SIZE", "6", 6),
        ("SLURM_NTASKS_PER_NODE", "8(x2),4", 8), ("SLURM_NTASKS_PER_NODE", "3", 3),
    ],
)  # fmt: skip
def test_the_ranks_of_a_host_are_what_its_launcher_says(
    on_a_large_host: pytest.MonkeyPatch, name: str, value: str, ranks: int
) -> None:
    on_a_large_host.delenv("LOCAL_WORLD_SIZE")
    for other in ("LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        on_a_large_host.delenv(other, raising=False)
    on_a_large_host.setenv(name, value)
    assert cores_here(Path("none")) == (96, ranks)


@pytest.mark.parametrize(
    ("written", "cores"),
    [("max 100000", 96), ("1650000 100000", 16), ("50000 100000", 1), ("garbage", 96)],
)
def test_a_container_has_its_share_of_the_machine(
    on_a_large_host: pytest.MonkeyPatch, tmp_path: Path, written: str, cores: int
) -> None:
    (tmp_path / "cpu.max").write_text(f"{written}\n")
    assert cores_here(tmp_path / "cpu.max") == (cores, 8)


def test_training_keeps_its_own(on_a_large_host: pytest.MonkeyPatch) -> None:
    """On the CPU what torch computes with, on an accelerator two; at least one is left."""
    bind(on_a_large_host, OWN)
    budget = budget_of(config(), 3)
    assert (budget.cores, budget.at_once, budget.threads) == (8, 3, 2)
    on_a_large_host.setattr(torch.cuda, "is_initialized", lambda: True)
    budget = budget_of(config(), 3)
    assert budget.cores == 10
    bind(on_a_large_host, range(2))
    budget = budget_of(config(), 3)
    assert budget.cores == 1


def test_matrices_in_factors_are_coded_one_fragment_at_a_time(
    on_a_large_host: pytest.MonkeyPatch,
) -> None:
    """They take turns with one work space: each has all cores."""
    budget = budget_of(config("dilocox", cores=6), 40)
    assert (budget.cores, budget.at_once, budget.threads) == (6, 1, 6)
    assert str(budget) == "at most 6 cores: 1 at a time, 6 threads each"


def test_more_cores_than_there_are_is_refused(on_a_large_host: pytest.MonkeyPatch) -> None:
    bind(on_a_large_host, OWN)
    with pytest.raises(ValueError, match="coding.cores=13: this process may run on 12.*1 to 12"):
        budget_of(config(cores=13), 3)
    assert budget_of(config(cores=12), 3).cores == 12


def refused() -> tuple[str, list[str]]:
    """What attaching with too many cores says, and what was told to other clusters before."""
    met: list[str] = []

    def compare(self: Rendezvous, name: str, value: Any) -> list[Any]:
        met.append(name)
        return [value]

    Rendezvous.compare = compare
    block = {"preset": "diloco", "clusters": {"num_clusters": 1}, "coding": {"cores": 4096}}
    dsx.init_distributed({"dsx": block})
    before, model = len(met), TinyNet(0)
    with pytest.raises(ValueError) as error:
        dsx.attach(model, torch.optim.SGD(model.parameters(), 0.1), config={"dsx": block})
    return str(error.value), met[before:]


def test_a_refused_budget_is_told_before_any_cluster_is_met() -> None:
    """Else the others have met this one, and only see that it is gone."""
    ((told, met),) = run_distributed(refused, 1)
    assert "coding.cores=4096: this process may run on" in told
    assert met == []


def train(folder: Path, preset: str) -> None:
    """Train alone with a budget of one core; print what torch computes with, thread by thread."""
    more = {"control": {"type": "fixed"}, "compression": {"rank": 4, "dense_rounds": 0}}
    control = more if preset == "dilocox" else {}
    block = {
        "preset": preset, "clusters": {"num_clusters": 1, "deadline_seconds": 60},
        "schedule": {"interval": 2}, "coding": {"cores": 1}, "metrics": {"dir": str(folder)},
        **control,
    }  # fmt: skip
    logging.basicConfig(level=logging.INFO)
    before = torch.get_num_threads()
    dsx.init_distributed({"dsx": block})
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = dsx.attach(model, optimizer, config={"dsx": block})
    for step in range(1, 5):
        optimizer.zero_grad()
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
    transport = handle.loop.transport
    assert isinstance(transport, GlooTransport)
    on_threads: list[int] = []
    for fifo in transport._fifos.values():
        found = Future[int]()
        fifo.submit(found, torch.get_num_threads)
        on_threads.append(found.result(60))
    handle.finish()
    handle.close()
    told = {"before": before, "training": torch.get_num_threads(), "coding": on_threads}
    print(json.dumps(told))


@pytest.mark.ci
@pytest.mark.parametrize("preset", ["diloco", "dilocox"])
def test_a_run_codes_within_its_budget_and_says_so(tmp_path: Path, preset: str) -> None:
    environment = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "2",
    }  # fmt: skip
    call = f"from tests.training.test_coding import *; train(Path({str(tmp_path)!r}), {preset!r})"
    run = subprocess.run(
        [sys.executable, "-c", call], env={**os.environ, **environment}, cwd=ROOT,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["training"] == told["before"] and told["coding"] == [1] * len(told["coding"]) != []
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (start,) = (record for record in records if record["kind"] == "start")
    assert start["coding_cores"] == 1
    assert "(coding.cores): at most 1 core: 1 at a time, 1 thread each" in run.stderr
    assert ("factors are made on the host" in run.stderr) == (preset == "dilocox")
    assert ("1 matrices travel in factors" in run.stderr) == (preset == "dilocox")
