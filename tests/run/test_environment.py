"""Variables of srun and mpirun, in the words of torch's launchers; modules that are waited for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dsx.run.environment import adopt_scheduler, first_of
from dsx.run.imports import after_import

SRUN = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "node[03-04]",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-host-81@1",
}  # fmt: skip


def adopted(environ: dict[str, str]) -> dict[str, str]:
    found = dict(environ)
    adopt_scheduler(found)
    return {name: value for name, value in found.items() if name not in environ}


def test_srun_is_read() -> None:
    found = adopted(SRUN)
    port = int(found.pop("MASTER_PORT"))
    assert found == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node03"}
    assert 15_000 <= port < 30_000
    assert int(adopted({**SRUN, "SLURM_PROCID": "2"})["MASTER_PORT"]) == port
    assert int(adopted({**SRUN, "SLURM_STEP_ID": "1"})["MASTER_PORT"]) != port
    assert adopted({**SRUN, "CUDA_VISIBLE_DEVICES": "3"})["LOCAL_RANK"] == "0"
    assert adopted({**SRUN, "CUDA_VISIBLE_DEVICES": "2,3"})["LOCAL_RANK"] == "1"
    assert "MASTER_ADDR" not in adopted({**SRUN, "MASTER_ADDR": "gate"})


def test_what_a_launcher_has_set_and_a_batch_script_alone_stay_as_they_are() -> None:
    assert adopted({**SRUN, "RANK": "0"}) == {}
    assert adopted({name: v for name, v in SRUN.items() if name != "SLURM_STEP_ID"}) == {}
    assert adopted({}) == {}


def test_mpirun_is_read() -> None:
    found = adopted(MPIRUN)
    port = int(found.pop("MASTER_PORT"))
    assert found == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    assert int(adopted({**MPIRUN, "PMIX_NAMESPACE": "prterun-host-82@1"})["MASTER_PORT"]) != port
    hydra = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    assert adopted({**hydra, "PMI_JOBID": "7"})["RANK"] == "0"
    assert adopted({**hydra, "MASTER_PORT": "29500"})["RANK"] == "0"
    with pytest.raises(RuntimeError, match=r"none of PMI_JOBID, HYDRA_JOBID is set"):
        adopted(hydra)
    with pytest.raises(RuntimeError, match=r"mpirun -x MASTER_ADDR=\$\(hostname\)"):
        adopted({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "4"})
    assert adopted({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "a"})["RANK"] == "1"


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("node[03-05,9],login", "node03"), ("a", "a"), ("a,b", "a"), ("n1-[1-2]-x,c", "n1-1-x")],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_of(hosts) == first


def test_a_module_is_followed_once_it_is_imported_and_not_when_it_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waited_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    followed: list[int] = []

    def follow(module: ModuleType) -> None:
        followed.append(module.value)

    after_import({"waited_for": follow, "dsx": lambda module: followed.append(0)})
    assert followed == [0]
    assert importlib.util.find_spec("waited_for") is not None
    assert followed == [0]
    importlib.import_module("waited_for")
    assert followed == [0, 1]
    importlib.reload(sys.modules["waited_for"])
    assert followed == [0, 1]
    assert importlib.util.find_spec("not_there_at_all") is None
