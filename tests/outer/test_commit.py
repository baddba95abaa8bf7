"""A transfer is applied once all clusters have told that they hold the same bytes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from dsx.config.schema import preset
from dsx.core.exchange import COMMIT, COMMIT_BYTES
from dsx.core.membership import Seat
from dsx.method.method import Method
from dsx.outer.commit import ATTEMPTS, Commit
from dsx.outer.recovery import MOST_REFUSALS, ParityError
from tests.levels import in_turn
from tests.outer.test_parity_check import WideNet, sgd, wide_loss
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, TinyNet, mean_loss

EVERY_KIND = [
    "diloco", "streaming_diloco", "diloco_delayed", "cocodc", "eager", "co2", "dilocox", "dreamddp",
    "recommended",
]  # fmt: skip


def corrupt(run: Simulated, cluster: int, times: int, after: int = 0) -> list[int]:
    """Let one cluster decode a bit of fragment 0's means wrongly, so often; return when it did."""
    channel = run.loops[cluster].state.channels[0]
    exchange, seen, done = channel.codec.exchange, 0, list[int]()

    def corrupted(x: torch.Tensor, launch: Any) -> Any:
        nonlocal seen
        mean = yield from exchange(x, launch)
        seen += 1
        if seen > after and len(done) < times:
            mean.view(torch.int32)[3:4] ^= 1 << 20
            done.append(launch.round)
        return mean

    channel.codec.exchange = corrupted  # type: ignore[method-assign]
    return done


def trained(
    method: Method, times: int, steps: int = 24, cluster: int = 1, num_clusters: int = 3,
    net: Any = TinyNet, loss: Any = mean_loss,
) -> tuple[Simulated, list[int]]:  # fmt: skip
    run = Simulated(net(), sgd, method, num_clusters)
    done = corrupt(run, cluster, times, after=1)
    for _ in range(steps):
        run.train_step(loss)
    return run, done


def state_of(run: Simulated) -> list[torch.Tensor]:
    """All that a run holds: outer state, codecs', and the models."""
    named: list[torch.Tensor] = []
    for loop, own in zip(run.loops, run.parameters(), strict=True):
        for fragment in loop.adapter.fragments:
            named += loop.state.named_state(fragment.id).values()
        named += own.values()
    return named


def assert_equal(one: Simulated, other: Simulated) -> None:
    for a, b in zip(state_of(one), state_of(other), strict=True):
        assert torch.equal(a, b)
    assert [loop.history for loop in one.loops] == [loop.history for loop in other.loops]


@pytest.mark.parametrize(("name", "cluster"), in_turn(EVERY_KIND, [0, 2]))
def test_what_was_decoded_wrongly_once_leaves_no_trace(
    name: str, cluster: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The attempt is made again, from what was before, by all: not a bit is other than without."""
    method = ALL_CASES[name].method(3) if name in ALL_CASES else preset(name, 3)
    steps = 40 if name == "recommended" else 24
    with caplog.at_level(logging.WARNING):
        run, done = trained(method, 1, steps, cluster)
        text = caplog.text
        undisturbed, _ = trained(method, 0, steps)
    assert len(done) == 1
    assert_equal(run, undisturbed)
    assert f"fragment 0, launch {done[0]}: cluster {cluster} came to another result" in text
    assert sum(loop.totals.refused for loop in run.loops) == 0


@pytest.mark.parametrize(
    "compression",
    [
        {"type": "quantized", "wire": "int4", "error_feedback": "fp32"},
        {"type": "low_rank", "rank": 4, "error_feedback": "fp32"},
        {"type": "quantized", "wire": "2bit", "error_feedback": "fp32"},
        {"type": "top_k", "error_feedback": "fp32"},
        {"type": "random_top_k", "error_feedback": "fp32"},
    ],
    ids=["int4", "low rank", "2 bit", "top k", "random top k"],
)
def test_residuals_and_warm_starts_follow_what_was_committed(compression: dict[str, Any]) -> None:
    method = preset("diloco", 4, schedule={"interval": 4}, compression=compression)
    both = [trained(method, n, 20, 3, 4, WideNet, wide_loss)[0] for n in (1, 0)]
    assert any(t.any() for t in both[0].loops[3].state.channels[0].codec.slots.values())
    assert_equal(*both)


@pytest.mark.parametrize("name", ["diloco", "diloco_delayed", "eager", "dilocox", "dreamddp"])
def test_what_goes_wrong_each_time_is_left_out_by_all(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    method = ALL_CASES[name].method(3)
    with caplog.at_level(logging.ERROR):
        run, done = trained(method, ATTEMPTS)
    assert len(done) == ATTEMPTS and len({*done}) == 1
    for loop in run.loops:
        assert loop.totals.refused == 1 and loop.history == run.loops[0].history
        for own, first in zip(loop.state.anchor, run.loops[0].state.anchor, strict=True):
            assert torch.equal(own, first)
    assert caplog.text.count("cluster 1 came to another result than the others, each time") == 3
    assert run.loops[0].history.rounds[0] == run.loops[0].history.launches[0] - 1 - len(
        [t for t in run.loops[0].in_flight if t.fragment == 0]
    )


@pytest.mark.parametrize("num_clusters", [2, 3])
def test_a_machine_that_changes_bytes_ends_the_run(num_clusters: int) -> None:
    method = preset("diloco", num_clusters, schedule={"interval": 2})
    run = Simulated(TinyNet(), sgd, method, num_clusters)
    done = corrupt(run, 1, 1000)
    with pytest.raises(ParityError, match=r"cluster 1 came .* 3 rounds in a row: .* changes bytes"):
        for _ in range(100):
            run.train_step(mean_loss)
    assert len(done) == ATTEMPTS * MOST_REFUSALS


def drive(held: dict[int, tuple[int, list[float]]]) -> list[list[int]]:
    """Run commits of clusters by id; return what each is told."""
    ids = sorted(held)
    told: list[list[int]] = []
    sent: list[Any] = []
    for position in range(len(ids)):
        commit = Commit(Seat.of(position, len(ids)))
        mean_hash, sideband = held[ids[position]]
        sent.append(
            (exchange := commit.exchange(mean_hash, torch.tensor(sideband)), next(exchange))
        )
    for position, (_, round) in enumerate(sent):
        for peer, (_, theirs) in enumerate(sent):
            if peer != position:
                round.incoming[peer][0].copy_(theirs.outgoing[position][0])
    for exchange, round in sent:
        assert round.what == COMMIT
        with pytest.raises(StopIteration) as stop:
            next(exchange)
        told.append(stop.value.value)
    return told


@pytest.mark.parametrize(
    ("held", "differing"),
    [
        ({0: (-7, [1.0]), 1: (-7, [1.0]), 2: (-7, [1.0])}, []),
        ({0: (7, []), 1: (7, []), 2: (8, [])}, [2]),
        ({0: (8, []), 1: (7, []), 2: (7, [])}, [0]),
        ({0: (7, [0.0]), 1: (7, [-0.0]), 2: (7, [0.0])}, [1]),  # the sideband counts, to the bit
        ({0: (7, []), 1: (8, [])}, [1]),
    ],
)
def test_all_hear_the_same_of_who_differs(
    held: dict[int, tuple[int, list[float]]], differing: list[int]
) -> None:
    assert drive(held) == [differing] * len(held)


def test_one_cluster_has_nobody_to_tell() -> None:
    exchange = Commit(Seat.of(0, 1)).exchange(7, torch.zeros(1))
    with pytest.raises(StopIteration) as stop:
        next(exchange)
    assert stop.value.value == []


def test_it_costs_eight_bytes_for_each_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    method = preset("diloco", 3, schedule={"interval": 4})
    run, _ = trained(method, 0, 4)
    monkeypatch.setattr(Commit, "exchange", lambda *_: iter(()))
    without, _ = trained(method, 0, 4)
    rounds = sum(run.loops[0].history.launches)
    both = [each.loops[0].totals.bytes_sent for each in (run, without)]
    assert both[0] - both[1] == 2 * COMMIT_BYTES * rounds > 0
