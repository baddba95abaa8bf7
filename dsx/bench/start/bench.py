"""Starts of several sizes, one after another, each with all its processes and sockets."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch

from dsx.bench.free_ports import free_low_ports
from dsx.bench.start.job import OF_ENGINE, STARTED, Found, Job
from dsx.bench.start.over_links import keys_of
from dsx.core.requirements import installed_version
from dsx.outer.digest import Digests
from dsx.plan.start_time import Measured

_MOST_RANKS = 1024
_FEW, _SOME, _SOME_TIMES = 4, 16, 3  # ranks whose starts are repeated: those of many say less
_HASHED = 64 << 20  # elements, 256 MiB
_DEADLINE_SECONDS = 600.0


class StartFailed(RuntimeError):
    """A start that was to be measured has not come to its end."""


@dataclass(frozen=True)
class Options:
    """`sizes`: C and N of each start; `repeats` of the smallest, of which the least counts."""

    sizes: Sequence[tuple[int, int]]
    repeats: int = 20
    deadline_seconds: float = _DEADLINE_SECONDS
    over_links: bool = False

    def __post_init__(self) -> None:
        for c, n in self.sizes:
            if c * n > _MOST_RANKS:
                raise ValueError(
                    f"--sizes {c}x{n}: {c * n} processes; at most {_MOST_RANKS} are forked here"
                )


def measure(options: Options, tell: Callable[[str], None]) -> list[Measured]:
    """Return a row per size; StartFailed with what a rank has said."""
    most = max(c for c, _ in options.sizes)
    with keys_of(most if options.over_links else 0) as keys:
        return _measure(options, keys, tell)


def _measure(options: Options, keys: Sequence[str], tell: Callable[[str], None]) -> list[Measured]:
    jobs = [
        (size, _job(*size, options.deadline_seconds, keys))
        for size in options.sizes
        for _ in range(_times(size[0] * size[1], options.repeats))
    ]
    found: dict[tuple[int, int], list[list[Found]]] = {}
    for (size, job), ranks in zip(jobs, starts([job for _, job in jobs]), strict=True):
        found.setdefault(size, []).append(ranks)
        row = summed([ranks])
        tell(
            f"{job.num_clusters} clusters of {job.ranks}: first rank {row.first_seconds:.3f} s of "
            f"a core, serving {row.serving_seconds:.3f} s, another rank {row.other_seconds:.3f} s; "
            f"{row.wall_seconds:.1f} s for all here"
        )
    return [summed(times) for times in found.values()]


def _times(num_ranks: int, repeats: int) -> int:
    """Return how often so many ranks are started."""
    if num_ranks <= _FEW:
        return repeats
    return min(repeats, _SOME_TIMES) if num_ranks <= _SOME else 1


def starts(jobs: Sequence[Job]) -> Iterator[list[Found]]:
    """Yield what the ranks of each job have found, started one job after another."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "RES_OPTIONS": "timeout:1 attempts:1",  # torch asks for the name of each that connects
    }  # fmt: skip
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "dsx.bench.start.forks", *(job.write() for job in jobs)],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=errors,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        found: list[Found] = []
        try:
            for line in process.stdout:
                if line.strip() == STARTED:
                    yield found
                    found = []
                else:
                    found.append(Found.read(line))
        except BaseException:
            process.terminate()
            raise
        if process.wait():
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["it says nothing"])[-1]
            raise StartFailed(f"the runs do not start: {last}")


def _job(num_clusters: int, ranks: int, deadline_seconds: float, keys: Sequence[str] = ()) -> Job:
    """Return a start of a size; `keys` are folders of at least so many clusters, over links."""
    count = num_clusters
    meeting, *ports = free_low_ports(1 + 2 * count)
    own, called_at = ports[:count], ports[count:] if keys else ()
    return Job(count, ranks, meeting, own, deadline_seconds, keys[:count], called_at)


def summed(times: Sequence[Sequence[Found]]) -> Measured:
    """Return the row of one size that was started several times.

    Processor time is that of the time that took the least; of wall time each phase's least, over
    the times, for its slowest rank: what others do on this host adds to both, and never takes away.
    """
    rows = [_of_once(found) for found in times]
    least = min(rows, key=lambda row: row.first_seconds + row.serving_seconds)
    phases = range(len(times[0][0].laps))
    slowest = [
        min(max(one.laps[k].seconds for one in found) for found in times)
        for k in phases
        if times[0][0].laps[k].phase not in OF_ENGINE
    ]
    return replace(least, wall_seconds=sum(slowest))


def _of_once(found: Sequence[Found]) -> Measured:
    by_rank = {(one.cluster, one.rank): one for one in found}
    first = by_rank[0, 0]
    num_clusters, ranks = max(c for c, _ in by_rank) + 1, max(r for _, r in by_rank) + 1
    others = [one for one in found if one.rank] or [one for one in found if one.cluster]
    over_links = first.gateway_seconds is not None
    asking = [by_rank[1, 0]] if over_links else others
    served = 0.0 if over_links else sum(one.sum("shared", ()) for one in found)
    served += sum(one.sum("own", ()) for one in found if one.cluster == 0)
    return Measured(
        num_clusters, ranks,
        max(one.sum("seconds") for one in found),
        first.sum("cpu_seconds"), first.sum("serving_seconds", ()),
        fmean(one.sum("cpu_seconds") for one in others),
        round(served), ranks if over_links else num_clusters * ranks + ranks,
        fmean(one.sum("shared") for one in asking),
        fmean(one.sum("own") for one in others), round(first.sum("own")),
        first.sockets, max(one.sockets for one in others),
        first.gateway_seconds, first.gateway_joined,
    )  # fmt: skip


def hash_rate() -> float:
    """Return the bytes per second of the digests by which equal weights are told."""
    x = torch.ones(_HASHED)
    with Digests() as digests:
        digests.of(x[: _HASHED // 8])
        since = time.perf_counter()
        digests.of(x)
        return 4 * _HASHED / (time.perf_counter() - since)


def this_host() -> str:
    """Return what was measured on, in words."""
    model = platform.processor() or platform.machine()
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{os.cpu_count()} cores of {model}, torch {installed_version('torch')}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
