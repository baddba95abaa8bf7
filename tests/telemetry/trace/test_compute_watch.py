"""Spans of forward and backward where the forward runs again inside the backward."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsx.core.membership import Seat
from dsx.engines.compute_trace import ComputeWatch
from dsx.telemetry.trace.parts import trace_path
from dsx.telemetry.trace.recorder import Trace
from tests.telemetry.trace.runs import records


class Block(nn.Module):
    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            return self.second(self.first(x).tanh())
        hidden: Any = checkpoint(self.first, x, use_reentrant=self.use_reentrant)
        return self.second(hidden.tanh())


def traced(path: Path, module: nn.Module) -> Trace:
    trace = Trace(path, "s", Seat.of(0, 2), (1, 1000))
    ComputeWatch(trace).follow(module)
    trace.begin(0)
    return trace


def counts(trace: Trace, path: Path) -> Counter[str]:
    trace.close()
    return Counter(span["name"] for span in records(path))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("is_whole", [True, False])
def test_recomputation_belongs_to_the_backward(
    tmp_path: Path, is_whole: bool, use_reentrant: bool
) -> None:
    path = trace_path(tmp_path, 0, 0)
    module = Block(None if is_whole else use_reentrant)
    plain = Block(None)
    plain.load_state_dict(module.state_dict())
    trace = traced(path, module)
    x = torch.ones(2, 4, requires_grad=True)
    for step in (1, 2):
        if is_whole:
            loss: Any = checkpoint(module, x, use_reentrant=use_reentrant)
        else:
            loss = module(x)
        loss.sum().backward()
        plain(x).sum().backward()
        trace.end_step(step)
    for own, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None
        assert torch.equal(own.grad, other.grad)
    assert counts(trace, path) == {"forward": 2, "backward": 2}
