"""Codes of a launch are made once: by the training thread where they are asked for at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsx.checkpoint.transfers import take_stock
from dsx.comm.in_process import InProcessHub, start_together
from dsx.config.schema import preset
from dsx.core.membership import Membership
from dsx.engines.torch import TorchAdapter
from dsx.outer.loop import OuterLoop
from dsx.outer.transfer import Transfer
from tests.tiny import TinyNet, batch

INT4 = {"type": "quantized", "wire": "int4"}
METHODS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "shift": ("recommended", {"schedule": {"interval": 4}, "delay": {"steps": 2}}, False),
    "shift, a round": (
        "recommended", {"schedule": {"interval": 4}, "delay": {"steps": 0, "outer_steps": 1}}, True,
    ),
    "eager": ("eager", {"schedule": {"interval": 4}, "compression": INT4}, True),
    "delayed": ("diloco_delayed", {"schedule": {"interval": 4}, "compression": INT4}, False),
}  # fmt: skip


def loops_of(name: str) -> list[OuterLoop]:
    """Two clusters that have trained to just before their first launch."""
    kind, overrides, _ = METHODS[name]
    method = preset(kind, 2, **overrides)
    hub, loops, models = InProcessHub(Membership.of(2)), [], [TinyNet() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for model, optimizer, transport in zip(models, optimizers, hub.transports(), strict=True):
        adapter = TorchAdapter(model, optimizer, method.fragments)
        loops.append(OuterLoop(method, adapter, transport))
    start_together(loops)
    for cluster, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        model(*batch(cluster, 1)).backward()
        optimizer.step()
    return loops


def first_launch(loop: OuterLoop) -> Transfer:
    """Launch alone: the other cluster has not, so nothing can be exchanged yet."""
    while not loop.in_flight or not isinstance(loop.in_flight[-1], Transfer):
        loop.launch_due()
    transfer = loop.in_flight[-1]
    assert isinstance(transfer, Transfer)
    return transfer


@pytest.mark.parametrize("name", METHODS)
def test_the_training_thread_encodes_where_codes_are_asked_for_at_once(name: str) -> None:
    loop = loops_of(name)[0]
    attempt = first_launch(loop).attempt
    is_asked_for = METHODS[name][2]
    assert loop.method.waits_for_codes == is_asked_for
    assert (attempt.square is not None) == is_asked_for  # of the codes
    if loop.method.encodes_at_launch:
        assert attempt.is_coded == is_asked_for


def test_a_save_has_codes_made_that_nobody_has_asked_for_and_they_are_made_once() -> None:
    """In place of what was contributed the buffers then hold what all decode of it."""
    loop = loops_of("shift")[0]
    transfer = first_launch(loop)
    attempt, buffers = transfer.attempt, transfer.buffers
    contributed = buffers.wire.clone()
    with take_stock(loop):
        pass
    assert attempt.is_coded and buffers.kept is not None
    shared = buffers.wire.clone()
    assert torch.equal(shared, buffers.kept) and not torch.equal(shared, contributed)
    codes = {n: m.clone() for n, m in loop.state.channels[transfer.fragment].codec.messages(  # type: ignore[attr-defined]
        attempt.launch).items()}  # fmt: skip
    buffers.wire.fill_(7.0)  # what an exchange does to it
    loop.attempts.require_coded(attempt)
    assert (buffers.wire == 7.0).all() and torch.equal(buffers.kept, shared)
    for name, message in loop.state.channels[transfer.fragment].codec.messages(  # type: ignore[attr-defined]
        attempt.launch).items():  # fmt: skip
        assert torch.equal(message, codes[name])
