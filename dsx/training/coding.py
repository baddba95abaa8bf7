"""On how many cores a rank codes: those of its own that training leaves; and on which device.

A rank's own cores are those of its affinity mask, and of its container's share of the machine. With
the launcher's mask they are shared by all ranks that it has started here; of fewer cores, as of a
NUMA node, by as many ranks as that is of the launcher's. Training keeps what torch computes with on
its thread, and where the model is on an accelerator two: the thread that launches kernels, and that
of the backward.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from dsx.compress.factor_products import require_exact
from dsx.config.schema import DsxConfig
from dsx.core.cores import OF_AN_ACCELERATOR, CodingCores
from dsx.core.engine import EngineAdapter
from dsx.core.side_stream import SideStream, Streams
from dsx.outer.resources import Resources

_RANKS_OF_HOST = (  # of torchrun and DeepSpeed, of Horovod's kind, Open MPI and Slurm
    "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE",
)  # fmt: skip
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def resources_of(config: DsxConfig, adapter: EngineAdapter) -> Callable[[int], Resources]:
    """Return what makes what this rank may use, of the number of fragments that it sends.

    Called by its training thread, before it meets any other cluster. ValueError for more cores than
    this process may run on, and for an accelerator that is not there; RuntimeError for one that
    does not multiply exactly.
    """
    cores, side = _num_cores(config), side_stream(config, adapter.device)
    takes_turns = config.method.compression.takes_turns

    def of_fragments(num_fragments: int) -> Resources:
        at_once = 1 if takes_turns else max(1, num_fragments)
        return Resources(config.state.folder, CodingCores(cores, at_once), side)

    return of_fragments


def side_stream(
    config: DsxConfig, device: torch.device, streams: Streams | None = None
) -> SideStream | None:
    """Return where factors are made, None for the host; outer steps are taken on `device`.

    `streams` stand for those of CUDA.
    """
    is_there = device.type == "cuda" or streams is not None
    makes_factors = config.method.compression.makes_factors
    if not makes_factors or not config.coding.makes_factors_there(is_there):
        return None
    if not is_there:
        if not torch.cuda.is_initialized():
            raise ValueError(
                "coding.factors='accelerator': this rank computes on no accelerator of CUDA; set "
                "it to 'host', or leave it out"
            )
        device = torch.device("cuda", torch.cuda.current_device())
    side = SideStream(device, streams)
    require_exact(side)
    return side


def _num_cores(config: DsxConfig) -> int:
    here, ranks = cores_here()
    cores = config.coding.cores
    if cores is None:
        cores = max(1, here // ranks - _kept_by_training())
    elif cores > here:
        raise ValueError(
            f"coding.cores={cores}: this process may run on {here}, by its affinity and its "
            f"container; give 1 to {here}, or leave it out"
        )
    return cores


def cores_here(quota: Path = _QUOTA) -> tuple[int, int]:
    """Return the cores that this process may run on, and how many ranks share them."""
    own = os.sched_getaffinity(0)
    ranks = _ranks_here()
    with suppress(OSError):  # no such process any more, or another user's
        launchers = os.sched_getaffinity(os.getppid())
        if own != launchers:
            ranks = min(ranks, max(1, round(ranks * len(own) / len(launchers))))
    limit = _quota_cores(quota)
    if limit is not None and limit < len(own):
        return limit, ranks
    return len(own), ranks


def _ranks_here() -> int:
    """Return how many ranks the launcher has started on this host, as far as it says; else 1."""
    for name in _RANKS_OF_HOST:
        if found := re.match(r"\d+", os.environ.get(name, "")):  # of Slurm "8(x2),4"
            return max(1, int(found[0]))
    return 1


def _quota_cores(quota: Path) -> int | None:
    """Return the whole cores of a container's share, at least one; None without a limit."""
    with suppress(OSError, ValueError):
        allowed, period = quota.read_text().split()
        return max(1, math.floor(int(allowed) / int(period)))
    return None


def _kept_by_training() -> int:
    return OF_AN_ACCELERATOR if torch.cuda.is_initialized() else torch.get_num_threads()
