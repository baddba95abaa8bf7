"""Rounds that are refused because of a NaN, and means that were decoded differently."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsx.checkpoint.outer_state import load_state
from dsx.comm.topology import RankInfo
from dsx.compress.quantized import Quantized
from dsx.config.schema import preset
from dsx.core.membership import Seat
from dsx.core.types import RoundsInARow
from dsx.method.method import Method
from dsx.outer.parity_check import ParityCheck
from dsx.outer.recovery import NonFiniteError, ParityError
from tests.checkpoint.saved import save_state
from tests.levels import by_default
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, TinyNet, mean_loss


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@given(numel=st.integers(1, 300_000), seed=st.integers(0, 99), data=st.data())
def test_the_hash_sees_every_bit_and_every_exchange(
    numel: int, seed: int, data: st.DataObject
) -> None:
    parity_check = ParityCheck(Seat.of(0, 1))
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    before = parity_check.hash_of(x)
    assert parity_check.hash_of(x.clone()) == before
    rank_info, bit = data.draw(st.integers(0, numel - 1)), data.draw(st.integers(0, 31))
    bits = x.view(torch.int32)
    kept = bits[rank_info].clone()
    bits[rank_info] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    assert parity_check.hash_of(x) != before
    bits[rank_info] = kept
    other = data.draw(st.integers(0, numel - 1))
    if x[rank_info] != x[other]:
        x[[rank_info, other]] = x[[other, rank_info]]
        assert parity_check.hash_of(x) != before


def test_the_hash_does_not_depend_on_the_threads() -> None:
    parity_check, x = ParityCheck(Seat.of(0, 1)), torch.randn(1_000_003)
    threads = torch.get_num_threads()
    hashes = set()
    for count in (1, 2):
        torch.set_num_threads(count)
        hashes.add(parity_check.hash_of(x))
    torch.set_num_threads(threads)
    assert len(hashes) == 1


class WideNet(torch.nn.Module):
    """One matrix large enough to be coded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(40, 40)


def wide_loss(model: torch.nn.Module, cluster: int, step: int) -> torch.Tensor:
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * cluster + step))
    return (model.layer(x) - x.roll(1, 1)).square().mean()  # type: ignore[operator]


RECOVERING = [
    "diloco", "streaming_diloco", "diloco_delayed", "cocodc", "eager", "co2", "dilocox",
    "co2's penalty on streaming fragments",
]  # fmt: skip


def run_with_nan(name: str, step: int, make_optimizer: Any = sgd) -> tuple[Simulated, list[Any]]:
    """Three clusters; after the inner step `step`, one weight of cluster 1 is a NaN."""
    run = Simulated(TinyNet(), make_optimizer, ALL_CASES[name].method(3), 3)
    events: list[Any] = []
    run.loops[0]._on_sync = events.append
    lose_a_weight(run, step)
    return run, events


def lose_a_weight(run: Simulated, step: int) -> None:
    for _ in range(step - 1):
        run.train_step(mean_loss)
    for cluster, model in enumerate(run.models):
        run.optimizers[cluster].zero_grad()
        mean_loss(model, cluster, step).backward()
        run.optimizers[cluster].step()
    run.models[1].layers[0].bias.data[0] = float("nan")
    run.step()


@pytest.mark.parametrize("step", by_default([2, 6, 9], 6))
@pytest.mark.parametrize("name", RECOVERING)
def test_a_round_with_a_nan_is_refused_by_all_and_its_cluster_starts_again(
    name: str, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody applies it, all name cluster 1, which is back among the others some rounds later."""
    run, events = run_with_nan(name, step)
    with caplog.at_level(logging.ERROR):
        for _ in range(40):
            run.train_step(mean_loss)
            for loop in run.loops:
                assert loop.history == run.loops[0].history
                for own, first in zip(loop.state.anchor, run.loops[0].state.anchor, strict=True):
                    assert torch.isfinite(own).all() and torch.equal(own, first)
        run.finish()
    refused = [event for event in events if "refused_by" in event]
    most = 1 + run.method.delay.rounds_under_way
    for p in range(len(run.loops[0].adapter.fragments)):
        assert sum(event["fragment"] == p for event in refused) <= most
    assert refused and all(event["refused_by"] == [1] for event in refused)
    assert run.loops[2].totals.refused == len(refused)
    assert max(event["applied_step"] for event in refused) <= step + 25
    assert all(r.in_a_row == 0 for r in run.loops[0].history.refusals)
    assert all(torch.isfinite(p).all() for p in run.models[1].parameters())
    assert f"launched at step {refused[0]['launched_step']}: cluster 1 sent values" in caplog.text


@pytest.mark.parametrize("name", ["diloco_delayed", "eager"])
def test_progress_that_is_not_finite_does_not_outlive_a_finish(name: str) -> None:
    """Cluster 1's is lost before a launch whose round is refused when the run is finished."""
    run, _ = run_with_nan(name, 3)
    for _ in range(3):
        run.train_step(mean_loss)
    before = run.parameters()
    run.finish()
    anchor = run.loops[0].state.anchor[0]
    order = [slot.name for slot in run.loops[0].adapter.fragments[0].layout]
    ends = [torch.cat([cluster[n].reshape(-1) for n in order]) for cluster in run.parameters()]
    assert torch.equal(ends[1], anchor)
    if name == "diloco_delayed":  # nothing was applied, so the others are where they were
        torch.testing.assert_close(run.parameters()[0], before[0], rtol=0, atol=1e-6)
    for _ in range(10):
        run.train_step(mean_loss)
    assert run.loops[0].history.rounds[0] >= 2
    assert all(p.isfinite().all() for cluster in run.parameters() for p in cluster.values())


@pytest.mark.parametrize("name", ["diloco", "streaming_diloco", "eager"])
def test_a_cluster_that_stays_lost_ends_the_run(name: str) -> None:
    """An inner optimizer with a NaN in its momentum makes every later step one, too."""

    def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    run, events = run_with_nan(name, 2, momentum)
    for parameter, state in run.optimizers[1].state.items():
        state["momentum_buffer"] = torch.full_like(parameter, float("nan"))
    with pytest.raises(
        NonFiniteError, match=r"cluster 1 sent .* \d rounds in a row .*; resume from a"
    ):
        for _ in range(100):
            run.train_step(mean_loss)
    refused = [event for event in events if "refused_by" in event]
    assert 2 + run.method.delay.rounds_under_way <= len(refused) <= 12


@pytest.mark.parametrize("name", ["diloco_delayed", "streaming_diloco", "eager", "cocodc"])
@pytest.mark.parametrize("more_steps", by_default([0, 1, 3, 5], 1))
def test_a_resume_amid_refusals_goes_on_alike(name: str, more_steps: int, tmp_path: Path) -> None:
    """Counts, transfers that will be refused, and what is kept of them are in the checkpoint."""
    first = run_with_nan(name, 6)[0]
    for _ in range(more_steps):
        first.train_step(mean_loss)
    for m, loop in enumerate(first.loops):
        save_state(loop, tmp_path / f"cluster_{m}", RankInfo(m, 3, 0, 1), "a run", {}, {})
    second = Simulated(TinyNet(), sgd, ALL_CASES[name].method(3), 3)
    for m, loop in enumerate(second.loops):
        load_state(loop, tmp_path / f"cluster_{m}", RankInfo(m, 3, 0, 1), {})
    for own, model in zip(second.models, first.models, strict=True):
        own.load_state_dict(model.state_dict())
    for _ in range(12):
        first.train_step(mean_loss)
        second.train_step(mean_loss)
        assert first.loops[1].history == second.loops[1].history
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
    assert first.loops[0].totals.refused > 0


def test_what_is_under_way_does_not_bring_lost_progress_back() -> None:
    """Compensation measures progress from the parameters sent: a restart has made none yet."""
    method = preset(
        "cocodc", 2,
        schedule={"type": "periodic", "interval": 4},
        delay={"type": "compensation", "steps": 2, "strength": 0.0},
        fragments={"by": "layer", "num_fragments": 2},
        outer_optimizer={"type": "sgd", "lr": 1.0},
    )  # fmt: skip
    run = Simulated(TinyNet(), sgd, method, 2)
    for _ in range(3):
        run.train_step(mean_loss)
    read = run.loops[1].adapter.read

    def read_nan(fragment: int, out: torch.Tensor, start: int = 0) -> None:
        read(fragment, out, start)
        if fragment == 0 and run.loops[1].history.launched[0] == 0:
            out[0] = float("nan")

    run.loops[1].adapter.read = read_nan  # type: ignore[method-assign]
    for _ in range(2):
        run.train_step(mean_loss)
    for cluster, model in enumerate(run.models):  # the boundary that applies both fragments
        run.optimizers[cluster].zero_grad()
        mean_loss(model, cluster, 6).backward()
        run.optimizers[cluster].step()
    run.step()
    assert run.loops[1].totals.refused == 1
    local, anchor = torch.zeros(84), run.loops[1].state.anchor[1]
    read(1, local)
    assert torch.equal(local, anchor)


@pytest.mark.parametrize("name", ["dreamddp", "averaging in fragments, overlapped"])
def test_without_an_anchor_the_run_ends_at_once(name: str) -> None:
    with pytest.raises(NonFiniteError, match="cluster 1 sent .*no anchor to go on from; resume"):
        run = run_with_nan(name, 3)[0]
        for _ in range(20):
            run.train_step(mean_loss)


def test_refusals_are_counted_per_cluster() -> None:
    refusals = RoundsInARow()
    for refused_by, launched, expected in [
        ([1], 4, (1, 4, [1])),
        ([0, 1], 8, (2, 4, [1])),
        ([2], 12, (1, 12, [2])),
        ([], 16, (0, 0, [])),
        ([0, 2], 20, (1, 20, [0, 2])),
    ]:
        refusals.count(refused_by, launched)
        assert (refusals.in_a_row, refusals.since, refusals.because_of) == expected


def test_a_refused_round_of_factors_tells_nothing_of_the_rank() -> None:
    method = preset(
        "diloco", 3, schedule={"interval": 4},
        compression={"type": "low_rank"},
        control={"type": "adaptive_rank", "rank": 4, "max_rank": 8, "min_interval": 4,
                 "step_seconds": 1.0, "round_seconds": 1.0},
    )  # fmt: skip
    run = Simulated(WideNet(), sgd, method, 3)
    for _ in range(7):
        run.train_step(wide_loss)
    decided = copy.deepcopy(run.loops[0].history.decisions)
    next(run.models[2].parameters()).data[0] = float("nan")
    run.train_step(wide_loss)
    assert run.loops[0].totals.refused == 1
    for loop in run.loops:
        assert loop.history.decisions == decided


@pytest.mark.parametrize("is_low_rank", [False, True])
def test_the_norm_that_all_choose_by_is_that_of_the_mean(is_low_rank: bool) -> None:
    """Also where every cluster tells of the matrices it owns, and one of the norm."""
    more: dict[str, Any] = {}
    if is_low_rank:
        seconds = {"step_seconds": 1.0, "round_seconds": 1.0}
        control = {"type": "adaptive_rank", "rank": 4, "max_rank": 8, "min_interval": 6, **seconds}
        more = {"compression": {"type": "low_rank"}, "control": control}
    schedule = {"interval": 6, "step_seconds": 1.0, "transfer_seconds": 1.0}
    method = preset("cocodc", 3, schedule=schedule, fragments={"by": "model"}, **more)
    run = Simulated(WideNet(), sgd, method, 3)
    events: list[Any] = []
    run.loops[1]._on_sync = events.append
    for _ in range(20):
        run.train_step(wide_loss)
    assert len(events) > 2
    for loop in run.loops:
        norm = loop.history.mean_norm[0]
        assert norm == pytest.approx(float(events[-1]["mean_norm"]), rel=1e-5)


def test_a_residual_is_not_spent_in_a_round_that_is_refused() -> None:
    """Codecs keep their state as it was: the next round sends what this one did not."""
    method = replace(
        preset("diloco", schedule={"interval": 4}),
        compression=Quantized(wire="int4", error_feedback="fp32"),
    )
    run = Simulated(WideNet(), sgd, method, 3)
    for _ in range(7):
        run.train_step(wide_loss)
    before = [{n: t.clone() for n, t in loop.state.channels[0].slots.items()} for loop in run.loops]
    assert all(slots["codec.residual.0"].any() for slots in before)
    for cluster, model in enumerate(run.models):
        run.optimizers[cluster].zero_grad()
        wide_loss(model, cluster, 8).backward()
        run.optimizers[cluster].step()
    next(run.models[1].parameters()).data[0] = float("inf")
    run.step()
    assert run.loops[0].totals.refused == 1
    for loop, slots in zip(run.loops, before, strict=True):
        for name, tensor in loop.state.channels[0].slots.items():
            assert torch.equal(tensor, slots[name]), name


def come_apart(run: Simulated, cluster: int) -> None:
    """Let one cluster hold what it would, had it gone on from another mean than the others."""
    state = run.loops[cluster].state
    state.anchor[0].view(torch.int32)[3] ^= 1 << 20
    state.channels[0].parity_check.memory[1] += 1


def run_apart(method: Method, num_clusters: int = 3, cluster: int = 2, steps: int = 4) -> Simulated:
    run = Simulated(TinyNet(), sgd, method, num_clusters)
    for _ in range(steps):
        run.train_step(mean_loss)
    come_apart(run, cluster)
    return run


def are_apart(run: Simulated, cluster: int) -> bool:
    return not torch.equal(*(run.loops[m].state.anchor[0] for m in (0, cluster)))


@pytest.mark.parametrize("name", ["diloco", "streaming_diloco", "diloco_delayed", "co2"])
def test_another_mean_that_was_applied_is_found_named_and_mended(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_apart(ALL_CASES[name].method(3))
    assert are_apart(run, 2)  # otherwise there is nothing to mend
    with caplog.at_level(logging.ERROR):
        for _ in range(20):
            run.train_step(mean_loss)
    for m in (1, 2):
        for p in range(len(run.loops[0].adapter.fragments)):
            assert torch.equal(run.loops[0].state.anchor[p], run.loops[m].state.anchor[p])
    assert "cluster 2 has applied another mean than cluster 0 in round" in caplog.text
    assert "fragment 0 launched at step" in caplog.text


def test_a_decision_does_not_rest_on_what_differs() -> None:
    """The norm that CoCoDC chooses by is the owner's, so histories stay equal until it is found."""
    run = run_apart(ALL_CASES["cocodc"].method(3))
    assert are_apart(run, 2)
    for _ in range(24):
        run.train_step(mean_loss)
        own, first = (replace(run.loops[m].history, guard={}) for m in (2, 0))
        assert own == first
    assert run.loops[2].history == run.loops[0].history
    assert not are_apart(run, 2)


@pytest.mark.parametrize("name", ["diloco", "diloco_delayed"])
@pytest.mark.parametrize("is_stopping", [False, True])
def test_the_end_compares_once_more(
    name: str, is_stopping: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """No later header tells of what came last: finish() exchanges headers once more."""
    method = preset(name, schedule={"interval": 4})
    wrong = 2
    if is_stopping:  # there is no majority
        method, wrong = replace(method, on_mismatch="stop"), 1
    run = run_apart(method, wrong + 1, wrong, steps=8)
    with caplog.at_level(logging.ERROR):
        if is_stopping:
            with pytest.raises(ParityError, match="cluster 1 has applied another mean .* in round"):
                run.finish()
        else:
            run.finish()
            assert not are_apart(run, wrong)
            if run.method.delay.restarts_from_anchor:
                ours, theirs = run.parameters()[0], run.parameters()[2]
                assert all(torch.equal(ours[n], theirs[n]) for n in ours)
            assert "cluster 2 has applied another mean than cluster 0 in round" in caplog.text


def test_it_can_stop_instead() -> None:
    method = replace(preset("diloco", schedule={"interval": 4}), on_mismatch="stop")
    run = run_apart(method, num_clusters=2, cluster=1)
    with pytest.raises(ParityError, match="cluster 1 has applied another mean .* round 1.*resume"):
        for _ in range(20):
            run.train_step(mean_loss)


def test_nothing_is_reported_where_nothing_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    run = Simulated(TinyNet(), sgd, ALL_CASES["co2"].method(3), 3)
    with caplog.at_level(logging.ERROR):
        for _ in range(20):
            run.train_step(mean_loss)
    assert not caplog.text and run.loops[0].totals.refused == 0
