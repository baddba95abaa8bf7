"""What srun and mpirun tell a rank, in the words of torch's launchers.

torchrun, deepspeed and accelerate set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
srun and mpirun number their processes in words of their own, and leave the place to meet to be
found: the first host of the step, or this one where there is no other; the port follows from the
job's number, so that two of them on one host do not meet by mistake. What is set stays as it is.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

_FIRST_PORT, _PORTS = 15_000, 15_000  # below those that systems give to connections


@dataclass(frozen=True)
class Scheduler:
    """One that starts ranks, and the names of its variables; `jobs` tell its runs apart."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    jobs: tuple[str, ...]
    hosts: str = ""  # a list of hosts, as Slurm writes it


_SCHEDULERS = (
    # SLURM_STEP_ID is set by srun only: a batch script, where another launcher runs, has the others
    Scheduler(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"), "SLURM_STEP_NODELIST",
    ),
    Scheduler(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Scheduler(
        "mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
        ("PMI_JOBID", "HYDRA_JOBID"),
    ),
)  # fmt: skip


def adopt_scheduler(environ: MutableMapping[str, str]) -> str | None:
    """Set what torch's launchers set, in place, from srun's or mpirun's; return whose it was.

    None where a launcher has set RANK, or nobody has started this process. RuntimeError where ranks
    of several hosts have no place to meet.
    """
    if "RANK" in environ:
        return None
    for scheduler in _SCHEDULERS:
        if scheduler.rank in environ and scheduler.world_size in environ:
            if scheduler.name == "srun" and "SLURM_STEP_ID" not in environ:
                continue
            _adopt(environ, scheduler)
            return scheduler.name
    return None


def _adopt(environ: MutableMapping[str, str], scheduler: Scheduler) -> None:
    world_size = environ[scheduler.world_size]
    here = environ.get(scheduler.local_world_size)
    found = {
        "RANK": environ[scheduler.rank],
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": _local_rank(environ, scheduler),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or _first_host(environ, scheduler),
        "MASTER_PORT": environ.get("MASTER_PORT") or _port(environ, scheduler),
    }
    if here is not None:
        found["LOCAL_WORLD_SIZE"] = here
    environ.update(found)


def _local_rank(environ: Mapping[str, str], scheduler: Scheduler) -> str:
    """Return the number of this rank's device: 0 where it sees no other (--gpus-per-task=1)."""
    devices = environ.get("CUDA_VISIBLE_DEVICES", "")
    if devices and "," not in devices:
        return "0"
    return environ.get(scheduler.local_rank, "0")


def _first_host(environ: Mapping[str, str], scheduler: Scheduler) -> str:
    hosts = environ.get(scheduler.hosts) if scheduler.hosts else None
    if hosts:
        return first_of(hosts)
    if environ.get(scheduler.local_world_size) == environ[scheduler.world_size]:
        return "127.0.0.1"
    raise RuntimeError(
        f"MASTER_ADDR is not set, and {scheduler.name} does not tell a rank where its first one "
        "is: set it to the host of rank 0, as by `mpirun -x MASTER_ADDR=$(hostname) -x "
        "MASTER_PORT=29500 python -m dsx.run SCRIPT`"
    )


def first_of(hosts: str) -> str:
    """Return the first name of a list as Slurm writes it: `node[03-05,9],login` is node03."""
    found = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\])?([^,\[]*)", hosts)
    assert found is not None  # every part of it may be empty
    return f"{found[1]}{found[2] or ''}{found[3]}"


def _port(environ: Mapping[str, str], scheduler: Scheduler) -> str:
    job = "/".join(environ.get(name, "") for name in scheduler.jobs)
    if not job.strip("/"):
        raise RuntimeError(
            f"MASTER_PORT is not set, and {scheduler.name} does not tell its runs apart (none of "
            f"{', '.join(scheduler.jobs)} is set): set it to a free port of rank 0's host, as by "
            "`mpirun -genv MASTER_PORT 29500 -n N python -m dsx.run SCRIPT`"
        )
    return str(_FIRST_PORT + zlib.crc32(job.encode()) % _PORTS)
