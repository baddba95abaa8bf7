"""On how many cores a rank codes: those of its own that training leaves; and on which device.

A rank's own cores are those of its affinity mask, and of its container's share of the machine. With
the launcher's mask they are shared by all ranks that it has started here; one that is bound to
cores of its own has those alone. Training keeps what torch computes with on its thread, and where
the model is on an accelerator two: the thread that launches kernels, and that of the backward.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from dsx.compress.factor_products import require_exact
from dsx.config.schema import DsxConfig
from dsx.core.cores import CodingCores
from dsx.core.engine import EngineAdapter
from dsx.core.side_stream import SideStream, Streams
from dsx.outer.resources import Resources

_OF_AN_ACCELERATOR = 2
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
    wanted = config.coding.factors
    if wanted == "host" or not config.method.compression.makes_factors:
        return None
    if device.type != "cuda" and streams is None:
        if wanted is None:
            return None
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
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    with suppress(OSError):  # no such process any more, or another user's
        if own != os.sched_getaffinity(os.getppid()):
            ranks = 1
    limit = _quota_cores(quota)
    if limit is not None and limit < len(own):
        return limit, ranks
    return len(own), ranks


def _quota_cores(quota: Path) -> int | None:
    """Return the whole cores of a container's share, at least one; None without a limit."""
    with suppress(OSError, ValueError):
        allowed, period = quota.read_text().split()
        return max(1, math.floor(int(allowed) / int(period)))
    return None


def _kept_by_training() -> int:
    return _OF_AN_ACCELERATOR if torch.cuda.is_initialized() else torch.get_num_threads()
