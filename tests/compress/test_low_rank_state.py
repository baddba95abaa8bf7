"""Low-rank channels over rounds: warm starts, rank, spectrum, residuals, dense rounds, state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsx.compress import low_rank, low_rank_matrix
from dsx.compress.base import Launch
from dsx.compress.quantized import Quantized
from dsx.core.buffers import Buffers, Opening, SharedWork
from dsx.core.membership import Seat
from dsx.core.types import Fragment, History, SyncParams
from dsx.method.control.adaptive_rank import AdaptiveRank
from tests.compress.channels import (
    Clusters,
    bits,
    correlated,
    drive,
    exact_mean,
    fragment_of,
    nmse,
)
from tests.compress.matrices import EXACT, decaying, matrix, plain_low_rank, side_by_side
from tests.levels import by_default, in_turn


def test_dense_rounds_are_those_of_quantized() -> None:
    """The first two, and every fifth: numbered by the launch, so that a resumed run agrees."""
    fragment = fragment_of((96, 80), (64, 64), (50,))
    low = Clusters(plain_low_rank(rank=4, dense_rounds=2, full_round_every=5), fragment, 2)
    dense = Clusters(Quantized(), fragment, 2)
    for round in range(1, 12):
        values = correlated(fragment.numel, 2, seed=round)
        mean, reference = low.average(values), dense.average(values)
        is_dense = round in (1, 2, 5, 10)
        assert torch.equal(mean, reference) == is_dense
        assert (low.bytes_sent == dense.bytes_sent) == is_dense
        spectrum = sum(c.spectrum for c in low.channels)
        assert bool(spectrum.any()) == (not is_dense)
        assert low.bytes_sent == low.payload_bytes(round)


def test_a_warm_start_keeps_more() -> None:
    """Of the same matrix each round more; a start from scratch stays where it was."""
    values = decaying(256, 128, 2)
    exact = exact_mean(values)
    warm = Clusters(plain_low_rank(rank=16), fragment_of((256, 128)), 2)
    errors = [nmse(warm.average(values), exact) for _ in range(5)]
    energies = torch.linalg.svdvals(exact.view(256, 128)).square()
    optimal = float(energies[16:].sum() / energies.sum())
    assert errors[4] < errors[1] < errors[0]
    assert errors[4] - optimal < 0.5 * (errors[0] - optimal)
    for _ in range(3):
        cold = Clusters(plain_low_rank(rank=16), fragment_of((256, 128)), 2)
        assert nmse(cold.average(values), exact) == errors[0]


def test_the_rank_follows_the_launch() -> None:
    """Up and down, clamped per matrix; each time near what an SVD of that rank would keep."""
    shapes = [(256, 128), (64, 64)]
    fragment = fragment_of(*shapes)
    values = side_by_side(decaying(256, 128, 2), decaying(64, 64, 2, seed=7))
    clusters = Clusters(plain_low_rank(rank=4, min_saving=1.0), fragment, 2, max_rank=40)
    exact = exact_mean(values)
    largest = int(64 * 64 * 4.25 / (128 * 8.0625))  # 16, for the small one
    for rank in (4, 12, 12, 24, 6, 6, 40, 1, 8):
        mean = clusters.average(values, rank)
        for index, (m, _) in enumerate(shapes):
            own = min(rank, largest if m == 64 else 40)
            energies = torch.linalg.svdvals(clusters.matrix(index, exact)).square()
            optimal = float(energies[own:].sum() / energies.sum())
            error = nmse(clusters.matrix(index, mean), clusters.matrix(index, exact))
            assert optimal * 0.999 <= error <= 1.4 * optimal
            warm = clusters.channels[0].slots[f"q.w{index}"]
            assert warm.any(dim=1).tolist() == [i < own for i in range(len(warm))]
        kept = sum(c.spectrum for c in clusters.channels)[:-1]
        assert kept[:rank].all() and not kept[rank:].any()


@pytest.mark.parametrize("num_clusters", [1, 2, 5])
@pytest.mark.parametrize("factor_wire", ["fp32", "int8"])
def test_the_spectrum_is_that_of_the_mean(factor_wire: Any, num_clusters: int) -> None:
    """Kept energies as by an SVD, summed over matrices; the total from probes, so a few % off."""
    shapes = [(256, 128), (80, 96), (128, 128), (100, 200)]
    fragment = fragment_of(*shapes)
    values = side_by_side(
        *[decaying(m, n, num_clusters, seed=10 * i) for i, (m, n) in enumerate(shapes)]
    )
    method = plain_low_rank(rank=12, factor_wire=factor_wire, wire="fp32")
    clusters = Clusters(method, fragment, num_clusters)
    exact = exact_mean(values)
    energies = [torch.linalg.svdvals(clusters.matrix(i, exact)).square() for i in range(4)]
    kept = torch.stack([e[:12] for e in energies]).sum(dim=0)
    missed: list[float] = []
    for _ in range(4):
        mean = clusters.average(values)
        spectrum = sum(c.spectrum for c in clusters.channels).double()
        assert float(spectrum[:12].sum()) == pytest.approx(float(kept.sum()), rel=0.02)
        assert float(spectrum[0]) == pytest.approx(float(kept[0]), rel=0.01)
        assert float(spectrum[-1]) == pytest.approx(float(exact.square().sum()), rel=0.05)
        missed.append(float((spectrum[-1] - spectrum[:-1].sum()) / (mean - exact).square().sum()))
    assert sum(missed) / 4 == pytest.approx(1, rel=0.15)
    assert max(missed) - min(missed) > 0.05  # an estimate, from new probes each round


def two_decaying(decay: int) -> tuple[Fragment, list[Tensor], int]:
    """Two matrices of one exponential spectrum, for two clusters, and the rank that keeps 95 %."""
    shapes = [(256, 200), (160, 256)]
    parts = [
        matrix(m, n, torch.exp(-torch.arange(1.0, min(m, n) + 1) / decay), seed)
        for seed, (m, n) in enumerate(shapes)
    ]
    energies = torch.exp(-2 * torch.arange(1.0, 161) / decay)
    needed = 1 + int((energies.cumsum(0) / energies.sum() < 0.95).sum())
    return fragment_of(*shapes), [torch.cat(parts)] * 2, needed


@pytest.mark.parametrize(("decay", "start"), [(8, 8), (8, 64), (14, 8), (14, 64)])
def test_a_controller_finds_the_rank_of_a_spectrum(decay: int, start: int) -> None:
    """The one that keeps 95 %, +- 8, in ten rounds with a window of one; without feedback."""
    fragment, values, wanted = two_decaying(decay)
    control = AdaptiveRank(
        start, max_rank=96, window=1, min_interval=2, step_seconds=1.0, round_seconds=3.0
    )
    method = plain_low_rank(rank=start, wire="fp32", min_saving=1.0)
    clusters = Clusters(method, fragment, 2, max_rank=96)
    history, initial = History(1, [fragment.numel]), SyncParams(4)
    for _ in range(10):
        sync_params = control.sync_params(initial, history)
        mean = clusters.average(values, sync_params.rank)
        spectrum = sum(c.spectrum for c in clusters.channels)
        control.decide(spectrum.tolist(), sync_params, initial, history)
    rank = control.sync_params(initial, history).rank
    assert rank is not None and abs(rank - wanted) <= 8
    assert nmse(mean, values[0]) <= 0.055


@pytest.mark.parametrize(("decay", "most"), by_default([(8, 1.7), (14, 2.0)], (8, 1.7)))
def test_with_feedback_the_rank_settles_above_what_one_round_needs(decay: int, most: float) -> None:
    """Directions serve what is left of earlier rounds, too; but growth comes to an end."""
    fragment, values, needed = two_decaying(decay)
    control = AdaptiveRank(8, max_rank=96, min_interval=2, step_seconds=1.0, round_seconds=3.0)
    method = plain_low_rank(rank=8, wire="fp32", min_saving=1.0, error_feedback="fp32")
    clusters = Clusters(method, fragment, 2, max_rank=96)
    history, initial = History(1, [fragment.numel]), SyncParams(4)
    ranks: list[int] = []
    for _ in range(80):
        sync_params = control.sync_params(initial, history)
        clusters.average(values, sync_params.rank)
        spectrum = sum(c.spectrum for c in clusters.channels)
        control.decide(spectrum.tolist(), sync_params, initial, history)
        ranks.append(sync_params.rank or 0)
    assert needed <= ranks[-1] <= most * needed
    assert max(ranks) <= 2.2 * needed


def residual_mean(clusters: Clusters) -> Tensor:
    """The mean residual of a fragment of one run of matrices."""
    return exact_mean([channel.slots["residual.0"] for channel in clusters.channels])


@pytest.mark.parametrize(
    ("num_clusters", "more"),
    [
        (1, {}),
        (2, {}),
        (5, {}),
        (2, {"dense_rounds": 2, "full_round_every": 5, "wire": "int4"}),
        (3, {"full_round_every": 3, "wire": "bf16"}),
    ],
)
def test_what_is_applied_and_what_is_left_is_what_was_put_in(
    num_clusters: int, more: dict[str, Any]
) -> None:
    """Through changes of rank, and dense rounds, which empty the same residual."""
    fragment = fragment_of((96, 80), (64, 120))
    method = plain_low_rank(**{**EXACT, "rank": 4, "error_feedback": "fp32", **more})
    clusters = Clusters(method, fragment, num_clusters, max_rank=12)
    assert list(clusters.channels[0].slots) == ["rank", "q.w0", "q.w1", "residual.0"]
    applied = torch.zeros(fragment.numel, dtype=torch.float64)
    total = applied.clone()
    for round, rank in enumerate((4, 4, 10, 10, 3, 3, 3, 3)):
        values = correlated(fragment.numel, num_clusters, seed=round)
        applied += clusters.average(values, rank)
        total += exact_mean(values)
        left = residual_mean(clusters)
        assert (applied + left - total).norm() <= 1e-5 * total.norm()
    assert residual_mean(clusters).norm() > 0.1 * total.norm()  # without it, that would not hold


def test_int8_factors_with_feedback_lose_only_the_code_of_the_mean() -> None:
    fragment = fragment_of((128, 96))
    errors: dict[str, float] = {}
    for feedback in ("fp32", "none"):
        method: Any = plain_low_rank(rank=8, error_feedback=feedback)
        clusters = Clusters(method, fragment, 2)
        inputs = [decaying(128, 96, 2, seed=round) for round in range(12)]
        applied = torch.stack([clusters.average(values) for values in inputs]).double().sum(dim=0)
        left = residual_mean(clusters) if feedback == "fp32" else 0
        total = torch.stack([exact_mean(values) for values in inputs]).sum(dim=0)
        errors[feedback] = nmse(applied + left, total)
    assert errors["fp32"] <= 1e-3
    assert errors["none"] > 50 * errors["fp32"]


def test_the_residual_decays_before_it_is_added() -> None:
    method = plain_low_rank(rank=8, error_feedback="fp32", feedback_decay=0.5)
    fragment = fragment_of((128, 96))
    first = Clusters(method, fragment, 1)
    values = decaying(128, 96, 2)
    first.average(values[:1])
    plain = first.resumed_by(Clusters(method, fragment, 1))
    plain.channels[0].slots["residual.0"].zero_()
    kept = first.channels[0].slots["residual.0"].clone()
    assert kept.norm() > 0.1
    ours, theirs = first.average(values[1:]), plain.average([values[1] + kept * 0.5])
    assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize(
    ("storage", "num_clusters"), in_turn(["none", "fp32", "bf16", "int8"], [2, 1, 5])
)
def test_state_is_all_that_a_channel_remembers(storage: Any, num_clusters: int) -> None:
    """Dense rounds before and in between, a rank that changes, a rest beside."""
    fragment = fragment_of((96, 80), (40, 40), (96, 96), (50,))
    method = plain_low_rank(rank=8, error_feedback=storage, dense_rounds=1, full_round_every=5)
    for stop in (1, 2, 4, 5):
        first = Clusters(method, fragment, num_clusters, max_rank=9)
        for round in range(stop):
            first.average(correlated(fragment.numel, num_clusters, seed=round), 8)
        second = first.resumed_by(Clusters(method, fragment, num_clusters, max_rank=9))
        for round in range(stop, stop + 3):
            values = correlated(fragment.numel, num_clusters, seed=round)
            rank = 8 if round < 6 else 5
            assert torch.equal(
                bits(first.average(values, rank)), bits(second.average(values, rank))
            )
        for ours, theirs in zip(first.channels, second.channels, strict=True):
            assert all(torch.equal(ours.slots[name], theirs.slots[name]) for name in ours.slots)
            assert torch.equal(ours.spectrum, theirs.spectrum)


@pytest.mark.parametrize("storage", ["fp32", "bf16", "int8"])
def test_what_factors_miss_is_the_same_however_many_rows_are_made_at_a_time(
    storage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as there is room for it, which is what is said of it."""
    fragment = fragment_of((96, 80), (40, 40))
    values = correlated(fragment.numel, 1)[0]
    found: list[Tensor] = []
    room: list[int] = []
    for together in (2**27, 700, 1):
        for module in (low_rank, low_rank_matrix):
            monkeypatch.setattr(module, "LOST_NUMEL", together)
        method, work = plain_low_rank(rank=8, error_feedback=storage), Buffers()
        channel = method.open(fragment, Seat.of(0, 1), 8, Opening(work=SharedWork(work)))
        drive([channel.exchange(values.clone(), Launch(1))])
        channel.settle(values.clone(), Launch(1))
        found.append(channel.errors["residual.0"].residual.read())
        room.append(work.num_bytes)
        assert room[-1] == method.shared_work_bytes(fragment)
    assert found[0].abs().amax() > 0.1
    for other in found[1:]:  # a library may round products of fewer rows otherwise
        torch.testing.assert_close(other, found[0], rtol=0, atol=0.05)
    assert room[0] > room[1] > room[2] > 0 if storage != "fp32" else room == [0, 0, 0]
