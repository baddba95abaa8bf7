"""Rounds that are refused because of a NaN, and means that were decoded differently."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsx.comm.swap import Peers
from dsx.config import preset
from dsx.guard import Guard
from dsx.judge import ParityError
from dsx.method import Method
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, TinyNet, mean_loss


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@given(numel=st.integers(1, 300_000), seed=st.integers(0, 99), data=st.data())
def test_the_hash_sees_every_bit_and_every_exchange(
    numel: int, seed: int, data: st.DataObject
) -> None:
    guard = Guard(Peers(0, 1))
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    before = guard.hash_of(x)
    assert guard.hash_of(x.clone()) == before
    place, bit = data.draw(st.integers(0, numel - 1)), data.draw(st.integers(0, 31))
    bits = x.view(torch.int32)
    kept = bits[place].clone()
    bits[place] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    assert guard.hash_of(x) != before
    bits[place] = kept
    other = data.draw(st.integers(0, numel - 1))
    if x[place] != x[other]:
        x[[place, other]] = x[[other, place]]
        assert guard.hash_of(x) != before


def test_the_hash_does_not_depend_on_the_threads() -> None:
    guard, x = Guard(Peers(0, 1)), torch.randn(1_000_003)
    threads = torch.get_num_threads()
    hashes = set()
    for count in (1, 2):
        torch.set_num_threads(count)
        hashes.add(guard.hash_of(x))
    torch.set_num_threads(threads)
    assert len(hashes) == 1


@pytest.mark.parametrize("name", ["diloco", "streaming_diloco", "diloco_delayed", "cocodc"])
def test_a_round_with_a_nan_is_refused_by_all(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Cluster 1 has a NaN when fragment 0 is launched; all go on with the anchor as it was."""
    events: list[dict] = []
    run = Simulated(TinyNet(), sgd, ALL_CASES[name].method(3), 3)
    for loop in run.loops:
        loop._on_sync = events.append  # type: ignore[assignment]
    while not run.loops[0].history.launched[0]:
        if run.loops[0].history.step + 1 in (4, 6):  # the first step that may launch it
            pass
        before = [loop.state.anchor[0].clone() for loop in run.loops]
        for cluster, model in enumerate(run.models):
            run.optimizers[cluster].zero_grad()
            mean_loss(model, cluster, run.num_steps + 1).backward()
            run.optimizers[cluster].step()
        run.models[1].layers[0].bias.data[0] = float("nan")
        run.step()
    with caplog.at_level(logging.ERROR):
        for _ in range(8):
            run.train_step(mean_loss)
        run.finish()
    assert "fragment 0 launched at step" in caplog.text
    assert "cluster 1 sent values that are not finite" in caplog.text
    assert all(loop.totals.refused >= 1 for loop in run.loops)
    assert any(event.get("refused_by") == [1] for event in events)
    for loop in run.loops:
        assert loop.history == run.loops[0].history
        assert all(torch.isfinite(anchor).all() for anchor in loop.state.anchor)
        assert torch.equal(loop.state.anchor[0], run.loops[0].state.anchor[0])
    assert len(before) == 3


def corrupt_once(run: Simulated, cluster: int) -> None:
    """Let one cluster decode one bit of the next mean of fragment 0 differently."""
    line = run.loops[cluster].state.lines[0]
    exchange = line.channel.exchange
    is_done = False

    def corrupted(x: torch.Tensor, launch: object):  # type: ignore[no-untyped-def]
        nonlocal is_done
        mean = yield from exchange(x, launch)  # type: ignore[arg-type]
        if not is_done:
            mean.view(torch.int32)[3] ^= 1 << 20
            is_done = True
        return mean

    line.channel.exchange = corrupted  # type: ignore[method-assign]


def corrupted_run(method: Method) -> Simulated:
    run = Simulated(TinyNet(), sgd, method, 3)
    for _ in range(4):
        run.train_step(mean_loss)
    corrupt_once(run, 2)
    return run


@pytest.mark.parametrize("name", ["diloco", "streaming_diloco", "diloco_delayed", "co2"])
def test_a_mean_decoded_differently_is_found_named_and_mended(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = corrupted_run(ALL_CASES[name].method(3))
    came_apart = False
    with caplog.at_level(logging.ERROR):
        for _ in range(20):
            run.train_step(mean_loss)
            first, last = (run.loops[m].state.anchor[0] for m in (0, 2))
            came_apart |= not torch.equal(first, last)
    assert came_apart  # otherwise there was nothing to mend
    for m in (1, 2):
        for p in range(len(run.loops[0].backend.fragments)):
            assert torch.equal(run.loops[0].state.anchor[p], run.loops[m].state.anchor[p])
    assert "cluster 2 decoded another mean than cluster 0 in round" in caplog.text
    assert "fragment 0 launched at step" in caplog.text


def test_it_can_stop_instead() -> None:
    run = corrupted_run(replace(preset("diloco", schedule={"interval": 4}), on_mismatch="stop"))
    with pytest.raises(ParityError, match="cluster 2 decoded another mean .* in round 2 .*resume"):
        for _ in range(20):
            run.train_step(mean_loss)


def test_nothing_is_reported_where_nothing_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    run = Simulated(TinyNet(), sgd, ALL_CASES["co2"].method(3), 3)
    with caplog.at_level(logging.ERROR):
        for _ in range(20):
            run.train_step(mean_loss)
    assert not caplog.text and run.loops[0].totals.refused == 0
