"""A rank of the second device: its threads, which begin on the first one, ask nothing of that."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from threading import local
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsx.compress.base import Launch
from dsx.compress.quantized import Quantized
from dsx.core.buffers import Opening
from dsx.core.membership import Seat
from dsx.core.on_device import on_device
from dsx.engines.cluster_collectives import _answer_on_host
from dsx.outer.attempt import Attempt, Attempts
from dsx.outer.channel import FragmentChannel
from dsx.outer.host_copy import HostCopy
from dsx.outer.results import Results
from dsx.outer.shared_state import copy_shared
from tests.compress.channels import fragment_of
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, TinyNet, mean_loss

SECOND = torch.device("cuda", 1)
FIRST = torch.device("cuda", 0)


class TwoDevices:
    """In place of torch.cuda, on the CPU: `asked` are the devices that threads were on as they
    waited for an event, or came to the end of a stream's block.
    """

    def __init__(self) -> None:
        self._thread = local()
        self.asked: list[torch.device] = []

    @property
    def current(self) -> torch.device:
        """The device of this thread."""
        return getattr(self._thread, "device", FIRST)

    @contextmanager
    def device(self, device: torch.device) -> Generator[None, None, None]:
        """Have this thread on `device`, and then where it was."""
        before, self._thread.device = self.current, device
        yield
        self._thread.device = before

    def Stream(self, device: torch.device) -> Any:  # noqa: N802
        """Return a new stream."""
        return SimpleNamespace(device=device, wait_stream=lambda o: None, synchronize=lambda: None)

    @contextmanager
    def stream(self, stream: Any) -> Generator[None, None, None]:
        """Start on a stream; behind it the one before is selected on its device again."""
        yield
        self.asked.append(self.current)

    def Event(self) -> Any:  # noqa: N802
        """Return an event."""
        ask = lambda: self.asked.append(self.current)  # noqa: E731
        return SimpleNamespace(record=lambda stream: None, synchronize=ask)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> TwoDevices:
    double = TwoDevices()
    for name in ("device", "Stream", "stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(double, name))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return double


def on_a_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result(60)


def test_a_device_of_cuda_is_selected_and_left_and_no_other(cuda: TwoDevices) -> None:
    with on_device(SECOND):
        assert cuda.current == SECOND
    assert cuda.current == FIRST
    with on_device(torch.device("cpu")):
        assert cuda.current == FIRST


def test_a_transfer_waits_on_its_own_device_for_the_copy_of_its_contribution(
    cuda: TwoDevices,
) -> None:
    posted = SimpleNamespace(averages=torch.zeros(0))
    buffers: Any = SimpleNamespace(sent=torch.ones(4), posted=posted)
    copy = HostCopy(buffers, cuda.Event(), None, 0, SECOND)
    assert on_a_thread(copy.is_finite)
    assert cuda.asked == [SECOND]


def test_codes_are_copied_to_their_own_device(cuda: TwoDevices) -> None:
    channel = FragmentChannel(
        Quantized(wire="int8", error_feedback="fp32"), fragment_of((64, 40)), 0, Seat.of(0, 2),
        lambda: Opening(at_launch=1), turn=nullcontext,
    )  # fmt: skip
    state: Any = SimpleNamespace(
        resources=SimpleNamespace(turn=nullcontext), channels=[channel], reopen=None, device=SECOND
    )
    around: Any = SimpleNamespace(follow_views=lambda reopen: None, places=None)
    attempts = Attempts(around, state, around, around, around, around)
    buffers: Any = SimpleNamespace(wire=torch.ones(2560), kept=torch.zeros(2560))
    what: Any = SimpleNamespace(fragment=0)
    attempt = Attempt(what, Launch(1), buffers, lambda: True, is_coded=False)
    on_a_thread(lambda: attempts.require_coded(attempt))
    assert torch.equal(buffers.kept, buffers.wire)
    assert cuda.asked == [SECOND]


def test_what_all_clusters_share_is_copied_from_its_own_device(cuda: TwoDevices) -> None:
    run = Simulated(
        TinyNet(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        ALL_CASES["diloco"].method(2), 2,
    )  # fmt: skip
    run.train_step(mean_loss)
    loop = run.loops[0]
    loop.state.device = SECOND
    copy = copy_shared(loop, Results(), prunes=False)
    assert copy is not None
    on_a_thread(copy)
    assert cuda.asked == [SECOND]


def test_ranks_of_a_cluster_wait_on_their_own_device_for_what_they_agree_on(
    cuda: TwoDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = SimpleNamespace(copy_=lambda values, non_blocking: None)
    monkeypatch.setattr(torch, "empty", lambda shape, pin_memory: answer)
    values: Any = SimpleNamespace(device=SECOND, shape=(1,), record_stream=lambda stream: None)
    wait = _answer_on_host(SimpleNamespace(wait=lambda: None), values)
    cuda.asked.clear()  # the training thread is on its device
    assert on_a_thread(wait) is answer
    assert cuda.asked == [SECOND]
