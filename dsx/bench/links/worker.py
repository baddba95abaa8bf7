"""One end of a measurement of `dsx bench links`: a process that meets the other and sends.

    python -m dsx.bench.links.worker --job JSON --cluster 0

Batches of messages are posted two deep, so that the line is never without. Cluster 0 says with each
batch whether one more comes, ahead of its messages. What was found goes to stdout, a line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsx.bench.links.job import FOUND, Found, Job, Passed
from dsx.bench.testbed import read_traffic
from dsx.comm.point_to_point import PointToPoint
from dsx.comm.topology import RankInfo
from dsx.core.membership import Seat

_DATA, _MORE, _READY = 0, 1, 2  # tags
_WARM_STEPS = 5
_HIDDEN, _TOKENS, _LAYERS = 128, 128, 4


class Stream:
    """This end's messages to and from the other."""

    def __init__(self, job: Job, groups: list[Any], seat: Seat) -> None:
        self._job, self._groups, self._seat = job, groups, seat
        self._other = seat.others[0]
        self._sends = job.ways == 2 or seat.position == 0
        self._takes = job.ways == 2 or seat.position == 1
        noise = torch.randint(0, 256, (job.message_bytes,), dtype=torch.uint8)
        count = 2 * job.batch
        self._made = [noise.clone() for _ in range(count if self._sends else 0)]
        self._places = [torch.zeros_like(noise) for _ in range(count if self._takes else 0)]

    def run(self, is_over: Callable[[], bool]) -> int:
        """Send and take batches until cluster 0 finds it over; return the payload bytes sent."""
        under_way: list[PointToPoint] = []
        number, is_on = 0, True
        while is_on:
            more = torch.ones(1, dtype=torch.uint8)
            told = self._messages(_MORE)
            if self._seat.position == 0:
                more.fill_(not is_over())
                told.send(more, self._other)
            else:
                told.receive(more, self._other)
            under_way.append(self._post(number % 2))
            told.wait()
            is_on = bool(more)
            if len(under_way) == 2:
                under_way.pop(0).wait()
            number += 1
        for batch in under_way:
            batch.wait()
        return number * self._job.batch * self._job.message_bytes * self._sends

    def get_ready(self) -> None:
        """Return once the other end is here, too."""
        messages = self._messages(_READY)
        messages.receive(_byte(), self._other)
        messages.send(_byte(), self._other)
        messages.wait()

    def _post(self, half: int) -> PointToPoint:
        messages, batch = self._messages(_DATA), self._job.batch
        part = slice(half * batch, (half + 1) * batch)
        for place in self._places[part]:
            messages.receive(place, self._other)
        for made in self._made[part]:
            messages.send(made, self._other)
        return messages

    def _messages(self, tag: int) -> PointToPoint:
        deadline = self._job.deadline_seconds
        return PointToPoint(self._groups, self._seat, "bench links", deadline, tag)


class Training:
    """Steps of a small network on one thread: many short operations, as a model's are."""

    def __init__(self) -> None:
        layers = [nn.Linear(_HIDDEN, _HIDDEN) for _ in range(_LAYERS)]
        self._model = nn.Sequential(*[m for layer in layers for m in (layer, nn.GELU())])
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._data = torch.randn(_TOKENS, _HIDDEN)
        self.step_until(_steps(_WARM_STEPS))

    def step_until(self, is_over: Callable[[], bool]) -> float:
        """Return the mean seconds of the steps that are begun before it is over."""
        taken: list[float] = []
        while not taken or not is_over():
            began = time.perf_counter()
            loss = (self._model(self._data) - self._data).square().mean()
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            taken.append(time.perf_counter() - began)
        return statistics.fmean(taken)


def _measure(job: Job, stream: Stream) -> Found:
    stream.run(lambda: True)  # connections are warm after it
    stream.get_ready()
    wire, cpu, began = _wire_bytes(job), time.process_time(), time.perf_counter()
    payload = stream.run(_after(job.seconds))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    passed = Passed(seconds, cpu, payload, _wire_bytes(job) - wire)
    alone: list[float] = []
    beside: list[float] = []
    if job.training_windows:
        training = Training()
        for _ in range(job.training_windows):
            stream.get_ready()
            alone.append(training.step_until(_after(job.seconds)))
            stream.get_ready()
            beside.append(_train_beside(training, stream, job.seconds))
    stream.get_ready()
    return Found(passed, alone, beside)


def _train_beside(training: Training, stream: Stream, seconds: float) -> float:
    """Return the seconds of a step while another thread transfers."""
    failed: list[Exception] = []

    def transfer() -> None:
        try:
            stream.run(_after(seconds))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=transfer, daemon=True)
    thread.start()
    found = training.step_until(lambda: not thread.is_alive())
    thread.join()
    if failed:
        raise failed[0]
    return found


def _wire_bytes(job: Job) -> int:
    """Return what the interface has sent; 0 on loopback, which others share."""
    if job.interface == "lo":
        return 0
    return read_traffic(Path("/proc/net/dev").read_text()).bytes_sent


def _after(seconds: float) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until


def _steps(count: int) -> Callable[[], bool]:
    left = iter(range(count))
    return lambda: next(left, None) is None


def _byte() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8)


def main() -> None:
    """Meet the other end, measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Job.read, required=True)
    parser.add_argument("--cluster", type=int, required=True)
    asked = parser.parse_args()
    job: Job = asked.job
    torch.set_num_threads(1)
    if job.rounds:
        from dsx.bench.links.rounds import measure_rounds

        print(FOUND + json.dumps(asdict(measure_rounds(job, asked.cluster))), flush=True)
        return
    rank_info, seat = RankInfo(asked.cluster, 2, 0, 1), Seat.of(asked.cluster, 2)
    way = job.way(asked.cluster)
    store, link = way.meet(rank_info, job.deadline_seconds)
    groups = way.connect(store, link, "bench", seat, 1, job.deadline_seconds)
    found = _measure(job, Stream(job, groups, seat))
    print(FOUND + json.dumps(asdict(found)), flush=True)
    if link is not None:
        link.close()


if __name__ == "__main__":
    main()
