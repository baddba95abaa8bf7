"""Who waits for whom where launches are encoded: for a turn, for a save, never another fragment."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsx.compress.base import Launch
from dsx.compress.low_rank import LowRank
from dsx.compress.quantized import Quantized
from dsx.core.buffers import Opening
from dsx.core.cores import CodingCores, Turn
from dsx.core.membership import Seat
from dsx.outer.attempt import Attempt, Attempts
from dsx.outer.channel import FragmentChannel
from tests.compress.channels import correlated, fragment_of

NUMEL = 64 * 40
SECONDS = 30.0


def nothing(tensors: Iterable[Tensor]) -> None:
    """All is in memory."""


def channels_of(
    count: int, turn: Turn, read_ahead: Callable[[Iterable[Tensor]], object] = nothing
) -> list[FragmentChannel]:
    codec = Quantized(wire="int8", error_feedback="fp32")
    opening = partial(Opening, at_launch=1, read_ahead=read_ahead)
    fragment = fragment_of((64, 40))
    seat = Seat.of(0, 2)
    return [FragmentChannel(codec, fragment, 0, seat, opening, turn=turn) for _ in range(count)]


def attempts_over(channels: list[FragmentChannel], turn: Turn) -> Attempts:
    state: Any = SimpleNamespace(
        resources=SimpleNamespace(turn=turn), channels=channels, reopen=None,
        device=torch.device("cpu"),
    )  # fmt: skip
    around: Any = SimpleNamespace(follow_views=lambda reopen: None, places=None)
    return Attempts(around, state, around, around, around, around)


def attempt_of(fragment: int) -> Attempt:
    """One whose launch is not yet encoded."""
    x = correlated(NUMEL, 2)[0].clone()
    buffers: Any = SimpleNamespace(wire=x, kept=torch.zeros(NUMEL))
    what: Any = SimpleNamespace(fragment=fragment)
    return Attempt(what, Launch(1), buffers, lambda: True, is_coded=False)


def is_encoded(attempt: Attempt) -> bool:
    buffers = attempt.buffers
    assert buffers.kept is not None
    return attempt.is_coded and torch.equal(buffers.kept, buffers.wire) and bool(buffers.wire.any())


def test_a_launch_that_waits_for_a_turn_holds_up_no_save() -> None:
    asked, may_code = Event(), Event()

    @contextmanager
    def turn() -> Generator[None, None, None]:
        asked.set()
        assert may_code.wait(SECONDS)
        yield

    (channel,) = channels_of(1, turn)
    attempts, attempt = attempts_over([channel], turn), attempt_of(0)
    with ThreadPoolExecutor(1) as thread:
        coded = thread.submit(attempts.require_coded, attempt)
        assert asked.wait(SECONDS)
        assert channel.gate.acquire(timeout=60.0), "held by one that waits for cores"
        channel.gate.release()
        may_code.set()
        coded.result(SECONDS)
    assert is_encoded(attempt)


def test_a_launch_waits_for_no_other_fragment_s_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one may be read from a slow disk."""
    channels = channels_of(2, nullcontext)
    attempts, slow, quick = attempts_over(channels, nullcontext), attempt_of(0), attempt_of(1)
    is_reading, may_read, encode = Event(), Event(), channels[0].encode

    def read_and_encode(x: Tensor, launch: Launch) -> None:
        is_reading.set()
        assert may_read.wait(SECONDS)
        encode(x, launch)

    monkeypatch.setattr(channels[0], "encode", read_and_encode)
    with ThreadPoolExecutor(2) as threads:
        reads = threads.submit(attempts.require_coded, slow)
        assert is_reading.wait(SECONDS)
        try:
            threads.submit(attempts.require_coded, quick).result(5.0)
            assert is_encoded(quick) and not slow.is_coded
        finally:
            may_read.set()
        reads.result(SECONDS)
    assert is_encoded(slow)


def test_with_one_core_nobody_waits_for_another_s_disk() -> None:
    """What a launch reads of a disk it has read before it takes its gate and its turn."""
    cores, is_reading, may_read = CodingCores(1, 1), Event(), Event()
    read = list[int]()

    def read_ahead(tensors: Iterable[Tensor]) -> None:
        read.extend(tensor.data_ptr() for tensor in tensors)
        is_reading.set()
        assert may_read.wait(SECONDS)

    slow, quick = channels_of(1, cores.turn, read_ahead) + channels_of(1, cores.turn)
    attempts = attempts_over([slow, quick], cores.turn)
    first, second = attempt_of(0), attempt_of(1)
    with ThreadPoolExecutor(2) as threads:
        reads = threads.submit(attempts.require_coded, first)
        assert is_reading.wait(SECONDS)
        try:
            threads.submit(attempts.require_coded, second).result(5.0)
            assert slow.gate.acquire(timeout=60.0), "held by one that waits for its disk"
            slow.gate.release()
        finally:
            may_read.set()
        reads.result(SECONDS)
    assert is_encoded(first) and is_encoded(second)
    assert {slot.data_ptr() for slot in slow.codec.slots.values()} <= {*read}


def test_what_an_attempt_settles_is_read_before_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was contributed takes in what was lost before, of a launch that has ended."""
    turns, read = list[bool](), list[int]()

    @contextmanager
    def turn() -> Generator[None, None, None]:
        turns.append(True)
        yield

    def read_ahead(tensors: Iterable[Tensor]) -> None:
        assert not turns and not channel.before.gate.locked()
        read.extend(tensor.data_ptr() for tensor in tensors)

    codec, opening = LowRank(rank=4, error_feedback="fp32"), partial(Opening, read_ahead=read_ahead)
    channel = FragmentChannel(codec, fragment_of((64, 40)), 4, Seat.of(0, 2), opening, turn=turn)
    monkeypatch.setattr(channel.codec, "settle", lambda sent, launch: None)
    sent = torch.ones(NUMEL)
    channel._settle(sent, Launch(1, 4))
    wanted = {slot.data_ptr() for slot in channel.before.settled.values()} | {sent.data_ptr()}
    assert turns and channel.before.is_settled(1) and len(wanted) > 1 and wanted <= {*read}
