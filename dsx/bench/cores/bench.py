"""How long a launch's coding takes on a number of cores, and what training loses meanwhile.

A rank's fragments are coded as a run codes them: by the channels of its codec, a thread each, with
turns of `coding.cores` (core/cores.py), sums, hashes and residuals with it. Of two clusters this is
one; the other's messages are recorded before, and there at once. Meanwhile the training thread
trains a small network on the cores that are left, one at least. Windows with coding and without
take turns, so that what else runs on the host falls on both alike. What a launch takes in processor
time has none of that in it: it is the process's, less what training's steps take without coding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from dsx.bench.cores.peer import Messages, record, replay
from dsx.compress.base import Compressor, Launch
from dsx.compress.low_rank import LowRank
from dsx.config.schema import preset
from dsx.core.cores import CodingCores, set_own_threads
from dsx.core.membership import Seat
from dsx.core.progress import SOON, Progress, as_count
from dsx.core.types import SMALL_NUMEL, Fragment, Slot
from dsx.outer.channel import FragmentChannel

CODECS: dict[str, dict[str, Any]] = {
    "int8": {"type": "quantized", "wire": "int8", "error_feedback": "fp32"},
    "int4": {"type": "quantized", "wire": "int4", "error_feedback": "fp32"},
    "2bit": {"type": "quantized", "wire": "2bit", "error_feedback": "fp32"},
    "low_rank": {"type": "low_rank", "rank": 128},
}
_SIDE = 2048  # of a matrix, at most
_WIDTH, _ROWS = 1024, 256  # of the network that is trained: some 50 ms a step on a core


@dataclass(frozen=True)
class Asked:
    """What is measured: a rank's launch of `numel` elements in `fragments`, on each of `cores`.

    `seconds` is how long a window lasts, at least; of `repeats` pairs of them the median counts.
    """

    codecs: Sequence[str]
    numel: int
    fragments: int
    cores: Sequence[int]
    here: int
    seconds: float
    repeats: int


@dataclass(frozen=True)
class CoresFigures:
    """Of one codec on so many cores; `training` is its rate meanwhile, by that without coding.

    `core_seconds` are of processor time. `had` is the share of its cores that training had without
    coding: less than 1 where the host was busy with something else.
    """

    compression: str
    numel: int
    fragments: int
    cores: int
    at_once: int
    threads: int
    training_threads: int
    launch_seconds: float
    core_seconds: float
    training: float
    had: float


def measure_cores(asked: Asked) -> list[CoresFigures]:
    """Return the figures, codec by codec; threads are as before in the end.

    ValueError for fragments in which a codec would code nothing.
    """
    for name in asked.codecs:
        _require_coded(name, asked)
    progress = Progress("windows", 2 * asked.repeats * len(asked.codecs) * len(asked.cores), True,
                        first_seconds=SOON, shown=as_count)  # fmt: skip
    before, found = torch.get_num_threads(), list[CoresFigures]()
    try:
        for name in asked.codecs:
            launches = _Launches(name, asked)
            found += [_measure(launches, asked, cores, progress) for cores in asked.cores]
    finally:
        set_own_threads(before)
    return found


def _measure(launches: _Launches, asked: Asked, cores: int, progress: Progress) -> CoresFigures:
    budget = CodingCores(cores, launches.at_once)
    training_threads = max(1, asked.here - cores)
    set_own_threads(training_threads)
    step, coded, pairs = _training(), list[list[float]](), list[tuple[_Window, _Window]]()
    with ThreadPoolExecutor(asked.fragments + 1) as pool:
        launches.code(pool, budget)  # each of its threads has then set its own
        _train_while(step, time.monotonic() + asked.seconds / 2)
        for _ in range(asked.repeats):
            alone = _train_while(step, time.monotonic() + asked.seconds)
            progress.moved(1)
            until = time.monotonic() + asked.seconds
            coding = pool.submit(launches.code_until, until, pool, budget)
            pairs.append((alone, _train_while(step, until, coding.done)))
            coded.append(coding.result())
            progress.moved(1)
    spent = [
        (both.processor - both.steps * alone.processor / alone.steps) / len(each)
        for (alone, both), each in zip(pairs, coded, strict=True)
    ]
    return CoresFigures(
        launches.name, asked.numel, asked.fragments, cores, budget.at_once, budget.threads,
        training_threads,
        launch_seconds=median(seconds for each in coded for seconds in each),
        core_seconds=median(spent),
        training=median(both.rate / alone.rate for alone, both in pairs),
        had=median(alone.processor / alone.seconds / training_threads for alone, _ in pairs),
    )  # fmt: skip


@dataclass(frozen=True)
class _Window:
    """Steps of training, in seconds by the wall and of all the process's threads."""

    steps: int
    seconds: float
    processor: float

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds


class _Launches:
    """Those of one cluster: its channels, warm, and what the other one answers."""

    def __init__(self, name: str, asked: Asked) -> None:
        self.name = name
        compression = _compression(name)
        self.at_once = 1 if compression.takes_turns else asked.fragments
        self._rank = CODECS[name].get("rank")
        numel = asked.numel // asked.fragments
        self._channels = [open_channel(compression, numel, self._rank or 0, 0)
                          for _ in range(asked.fragments)]  # fmt: skip
        seed = torch.Generator().manual_seed(1)
        self._sent = [torch.randn(numel, generator=seed) for _ in self._channels]
        self._work = [torch.empty(numel) for _ in self._channels]
        self._round = 0
        first, self._messages = self._recorded(compression, numel)
        for _ in range(2):  # a cold round, and one in which all is allocated
            self._round += 1
            messages = first if self._round == 1 else self._messages
            for fragment in range(asked.fragments):
                self._code(fragment, messages, CodingCores(1, 1))

    def _recorded(self, compression: Compressor, numel: int) -> tuple[Messages, Messages]:
        """Return the other's messages of a first round, and of a usual one."""
        own, theirs = (open_channel(compression, numel, self._rank or 0, m).codec for m in range(2))
        xs = [self._sent[0], torch.randn(numel, generator=torch.Generator().manual_seed(2))]
        first, usual = (
            record(own, theirs, [x.clone() for x in xs], Launch(round, self._rank))
            for round in (1, 2)
        )
        return first, usual

    def code_until(self, until: float, pool: ThreadPoolExecutor, cores: CodingCores) -> list[float]:
        """Code launch after launch, on its own thread; return the seconds of each."""
        found: list[float] = []
        while not found or time.monotonic() < until:
            found.append(self.code(pool, cores))
        return found

    def code(self, pool: ThreadPoolExecutor, cores: CodingCores) -> float:
        """Code one launch of all fragments; return the seconds until the last has ended."""
        self._round += 1
        began = time.perf_counter()
        fragments = range(len(self._channels))
        for ended in [pool.submit(self._code, f, self._messages, cores) for f in fragments]:
            ended.result()
        return time.perf_counter() - began

    def _code(self, fragment: int, messages: Messages, cores: CodingCores) -> None:
        channel, launch = self._channels[fragment], Launch(self._round, self._rank)
        sent, x = self._sent[fragment], self._work[fragment]
        x.copy_(sent)
        replay(channel.codec, x, launch, messages, cores.turn)
        with cores.turn():
            channel.parity_check.hash_of(x)
            if channel.codec.settled:
                channel.codec.settle(x.copy_(sent), launch)


def open_channel(compression: Compressor, numel: int, rank: int, cluster: int) -> FragmentChannel:
    """Return the channel of a fragment of `numel` elements on a cluster of two.

    Its matrices are as large as it allows, up to 2048 x 2048; what is left makes one more, of as
    many rows as it has, and a vector of less than a row.
    """
    side = min(_SIDE, math.isqrt(numel))
    matrices, rest = divmod(numel, side**2)
    shapes = [*[(side, side)] * matrices, (rest // side, side), (rest % side,)]
    slots, offset = list[Slot](), 0
    for index, shape in enumerate(shapes):
        slot = Slot(f"w{index}", shape, offset)
        slots += [slot] if slot.numel else []
        offset += slot.numel
    return FragmentChannel(compression, Fragment(0, 0, tuple(slots)), rank, Seat.of(cluster, 2))


def _compression(name: str) -> Compressor:
    return preset("diloco", 2, compression=CODECS[name]).compression


def _require_coded(name: str, asked: Asked) -> None:
    """Raise ValueError where a fragment's matrices are too small for the codec."""
    compression = _compression(name)
    side = math.isqrt(SMALL_NUMEL)
    while isinstance(compression, LowRank) and not compression.takes(Slot("w", (side, side), 0)):
        side += 1
    if asked.numel // asked.fragments < side**2:
        raise ValueError(
            f"--numel {asked.numel} in --fragments {asked.fragments}: {name} codes nothing in "
            f"{asked.numel // asked.fragments} elements; give each fragment {side**2} or more"
        )


def _training() -> Callable[[], object]:
    """Return a step of a small network's training."""
    layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(3)]
    network = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])
    optimizer, x = torch.optim.AdamW(network.parameters()), torch.randn(_ROWS, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        network(x).square().mean().backward()
        optimizer.step()

    return step


def _train_while(
    step: Callable[[], object], until: float, is_done: Callable[[], bool] = lambda: True
) -> _Window:
    """Train until then, and until it is done."""
    began, processor, count = time.perf_counter(), time.process_time(), 0
    while not count or time.monotonic() < until or not is_done():
        step()
        count += 1
    return _Window(count, time.perf_counter() - began, time.process_time() - processor)
