"""What a layer's backward takes on an accelerator: `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import time

import pytest
import torch

from dsx.config.schema import preset
from dsx.engines.torch import TorchAdapter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_events_measure_the_kernels_and_not_their_enqueueing() -> None:
    """Of two layers one has sixteen times the work; together they take what the backward does."""
    wide, narrow = 16384, 1024
    model = torch.nn.Sequential(
        torch.nn.Linear(narrow, narrow), torch.nn.Linear(narrow, wide)
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    adapter = TorchAdapter(model, optimizer, preset("dreamddp").fragments)
    adapter.watch_backward(lambda fragment: None, "before")
    x = torch.randn(8192, narrow, device="cuda")
    whole = 0.0
    for _ in range(3):
        loss = model(x).sum()
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss.backward()
        torch.cuda.synchronize()
        whole = time.perf_counter() - began
        adapter.end_inner_step()
    first, last = adapter.backward_seconds(0), adapter.backward_seconds(1)
    assert first is not None and last is not None
    assert last > 4 * first
    assert 0.5 * whole < first + last < 1.5 * whole
