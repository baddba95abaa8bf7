"""Seconds of a backward by events of an accelerator behind the host: read, not awaited."""

from __future__ import annotations

import pytest
import torch

from dsx.config.schema import preset
from dsx.engines import backward_hooks
from dsx.engines.backward_clock import EventClock
from dsx.engines.torch import TorchAdapter
from tests.tiny import NUM_LAYERS, TinyNet


class Device:
    """Runs what has been enqueued when it is told to: events, and kernels of so many ms."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queue: list[float | Event] = []

    def run(self, most: int | None = None) -> None:
        """Take that many things off the queue; all by default."""
        for _ in range(len(self.queue) if most is None else most):
            thing = self.queue.pop(0)
            if isinstance(thing, Event):
                thing.at = self.now
            else:
                self.now += thing

    def make_event(self) -> Event:
        return Event(self)


class Event:
    """As much of torch.cuda.Event as is used; waiting is not."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.at: float | None = None

    def record(self) -> None:
        self.device.queue.append(self)

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, end: Event) -> float:
        assert self.at is not None and end.at is not None
        return end.at - self.at


class Kernels(torch.autograd.Function):
    """Enqueues a kernel of so many ms in the backward, which takes the host no time."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, device: Device, ms: float) -> torch.Tensor:
        ctx.device, ctx.ms = device, ms  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        ctx.device.queue.append(ctx.ms)  # type: ignore[attr-defined]
        return grad, None, None


class Net(TinyNet):
    """The backward of layer l takes `ms[l]`."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device, self.ms = device, [100.0, 500.0, 200.0, 300.0]

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        for layer, ms in zip(self.layers, self.ms, strict=True):
            x = Kernels.apply(torch.tanh(layer(x)), self.device, ms)
        return x


def test_events_are_read_at_the_boundary_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    monkeypatch.setattr(backward_hooks, "_clock_of", lambda _: EventClock(device.make_event))
    model = Net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    adapter = TorchAdapter(model, optimizer, preset("dreamddp").fragments)
    launched: list[int] = []
    adapter.watch_backward(launched.append, "before")

    def seconds_after_a_step() -> list[float | None]:
        model(torch.ones(2, 6)).sum().backward()
        adapter.end_inner_step()
        return [adapter.backward_seconds(layer) for layer in range(NUM_LAYERS)]

    assert seconds_after_a_step() == [None] * NUM_LAYERS  # the device has not begun
    assert launched == [3, 2, 1, 0]
    device.run(6)  # two layers: a kernel each, and what is recorded around it
    model.ms = [1000.0, 5000.0, 2000.0, 3000.0]
    assert seconds_after_a_step() == [None, None, pytest.approx(0.2), pytest.approx(0.3)]
    device.run()
    assert [adapter.backward_seconds(layer) for layer in (2, 3)] == [
        pytest.approx(0.2), pytest.approx(0.3),
    ]  # fmt: skip
    adapter.end_inner_step()  # now both steps are there, and the last one counts
    assert [adapter.backward_seconds(layer) for layer in range(NUM_LAYERS)] == [
        pytest.approx(ms / 1000) for ms in model.ms
    ]
