"""What records say of transfers that have not ended, and of what the process holds."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dsx.comm.links.link import LinkFigures
from dsx.comm.world import World
from dsx.core.membership import Seat
from dsx.outer.transfer import Transfer
from dsx.telemetry.measured_rates import MeasuredRates
from dsx.training.machine import Machine
from dsx.training.under_way import UnderWay
from tests.simulated import Simulated
from tests.tiny import CASES, TinyNet, mean_loss

SYNCED = {"diloco": (1, 0), "streaming_diloco": (3, 2), "diloco_delayed": (1, 4)}  # and the delay


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("name", SYNCED)
def test_each_transfer_is_launched_and_applied_once(name: str) -> None:
    run = Simulated(TinyNet(), sgd, CASES[name].method(), 2)
    launched: list[Mapping[str, Any]] = []
    way = UnderWay(run.loops[0], launched.append)
    said: dict[int, dict[str, Any]] = {}
    for step in range(1, 21):
        run.train_step(mean_loss)
        said[step] = way.pass_boundary()
    pairs = [[one["fragment"], one["step"]] for one in launched]
    applied = {step: told["applied"] for step, told in said.items() if "applied" in told}
    assert len(pairs) >= 4 and len({fragment for fragment, _ in pairs}) == SYNCED[name][0]
    flat = [pair for told in applied.values() for pair in told]
    assert flat == pairs[: len(flat)] and len(pairs) - len(flat) <= SYNCED[name][0]
    assert all(
        step == begun + SYNCED[name][1] for step, told in applied.items() for _, begun in told
    )
    arrived = [pair for told in said.values() for pair in told.get("arrived", ())]
    assert arrived == ([] if name == "diloco" else pairs)  # it comes at once here


def test_what_has_not_come_is_not_said_to_be_here_and_a_way_back_forgets_it() -> None:
    run = Simulated(TinyNet(), sgd, CASES["streaming_diloco"].method(), 2)
    way = UnderWay(run.loops[0], lambda record: None)
    while not run.loops[0].in_flight:
        run.train_step(mean_loss)
    (transfer,) = run.loops[0].in_flight
    assert isinstance(transfer, Transfer)
    pending, transfer.pending = transfer.pending, cast(Any, SimpleNamespace(has_arrived=False))
    assert way.pass_boundary() == {}
    transfer.pending = pending
    pair = [transfer.fragment, transfer.launched]
    assert way.pass_boundary() == {"arrived": [pair]}
    assert way.pass_boundary() == {}
    way.begin()
    run.loops[0].drain()
    assert way.pass_boundary() == {}


def machine_of(links: dict[tuple[int, int], LinkFigures], **options: Any) -> Machine:
    run = Simulated(TinyNet(), sgd, CASES["diloco"].method(), 2)
    run.train_step(mean_loss)
    world = SimpleNamespace(seat=Seat.of(1, 3), rank=4, link=SimpleNamespace(figures=links.get))
    return Machine(cast(World, world), run.loops[1], 1 << 20, **options)


def test_the_process_is_looked_at_and_its_links_to_ranks_of_its_number() -> None:
    links = {(0, 4): LinkFigures(0.02, 0.05, 7, 8), (2, 4): LinkFigures(0.0, 0.0, 1, 2)}
    machine = machine_of(links)
    before = machine.read()["process_bytes"]
    held = mmap.mmap(-1, 64 << 20)  # pages that nobody has had
    held.write(os.urandom(1 << 16) * (1 << 10))
    found = machine.read()
    assert 60 << 20 < found["process_bytes"] - before < 128 << 20
    del held
    assert found["outer_planned_bytes"] == 1 << 20 and 0 < found["outer_bytes"] < 1 << 20
    assert found["links"] == [
        {"to": 0, "sent_bytes": 7, "received_bytes": 8, "round_trip_seconds": 0.05,
         "least_seconds": 0.02},
        {"to": 2, "sent_bytes": 1, "received_bytes": 2},
    ]  # fmt: skip
    assert "links" not in machine_of({}).read()
    measured = machine_of(links, measured=MeasuredRates(9e6, {0: 8e6})).read()
    assert measured["measured_bytes_per_second"] == 9e6
    told = [link.get("measured_bytes_per_second") for link in measured["links"]]
    assert told == [8e6, None] and "measured_bytes_per_second" not in found
    assert "device_bytes" not in found or torch.cuda.is_initialized()


def test_a_look_is_due_once_in_a_while() -> None:
    machine = machine_of({}, seconds=3600)
    assert [machine.is_due() for _ in range(3)] == [True, False, False]
    machine = machine_of({}, seconds=0)
    assert [machine.is_due() for _ in range(3)] == [True, True, True]
