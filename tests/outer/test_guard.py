"""The guard's figures: what they are of, equal everywhere, and the same in a run that goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsx.config.schema import preset
from dsx.core.types import History
from dsx.engines import simulated
from dsx.method.alarms import judge
from dsx.method.health import Sums, effective_gain, figures_of
from dsx.method.outer_optimizer import SGD, Momentum, Nesterov
from dsx.outer.guard import SAMPLED, product_of, sample_of
from dsx.outer.parity_check import ParityResult, bits_of, of_bits
from tests.checkpoint.gloo_in_one_process import GlooHub, HeldTransport
from tests.checkpoint.half_arrived import resume, save_all
from tests.compress.test_over_gloo import WideNet, adamw, loss
from tests.outer.test_parity_check import come_apart
from tests.simulated import Simulated

FIGURES = ("autocorrelation", "cluster_cosine", "norm_ratio", "norm_ratio_of", "effective_gain")
INT4_SHIFT: dict[str, Any] = {
    "schedule": {"interval": 4},
    "delay": {"type": "shift", "steps": 3},
    "compression": {"type": "quantized", "small_wire": "fp32"},
}
DELAYED: dict[str, Any] = {"delay": {"type": "one_step"}}
Told = dict[tuple[int, int, int], dict[str, Any]]


def new_run(told: Told | None = None, num_clusters: int = 3, **axes: Any) -> Simulated:
    method = preset("diloco", num_clusters, **(axes or {"schedule": {"interval": 2}}))
    run = Simulated(WideNet(), adamw, method, num_clusters)
    if told is not None:
        for cluster, loop in enumerate(run.loops):

            def note(event: Any, cluster: int = cluster) -> None:
                key = cluster, event["fragment"], event["round"]
                found = {name: event[name] for name in FIGURES if name in event}
                told.setdefault(key, found)  # a round that is refused has the number of the last

            loop._on_sync = note
    return run


def train(run: Simulated, num_steps: int) -> None:
    while run.num_steps < num_steps:
        run.train_step(loss)


def test_figures_are_of_what_is_sent() -> None:
    torch.manual_seed(0)
    sent, before = torch.randn(4, 500), torch.randn(500)
    mean = sent.mean(0)
    sums = Sums(
        product_of(mean, mean), product_of(before, before), product_of(mean, before),
        [product_of(own, own) for own in sent],
    )  # fmt: skip
    sent[2] *= 3
    mean = sent.mean(0)
    sums = Sums(
        product_of(mean, mean), sums.before, product_of(mean, before),
        [product_of(own, own) for own in sent],
    )  # fmt: skip
    found = figures_of(sums, Nesterov(0.7, 0.9), True)
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    dots = sum(float(sent[a] @ sent[b]) for a, b in pairs)
    weights = sum(float(sent[a].norm() * sent[b].norm()) for a, b in pairs)
    assert found.cosine == pytest.approx(dots / weights, rel=1e-4)
    rho = float(torch.cosine_similarity(mean, before, dim=0))
    assert found.autocorrelation == pytest.approx(rho, rel=1e-4)
    others = sorted(float(own.norm()) for m, own in enumerate(sent) if m != 2)
    assert found.farthest == 2
    assert found.norm_ratio == pytest.approx(float(sent[2].norm()) / others[1], rel=1e-4)
    assert figures_of(sums, Nesterov(0.7, 0.9), False).cosine is None


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.8])
def test_the_gain_is_that_of_a_first_order_autoregression(rho: float) -> None:
    """Outer rules run over a long series whose lag-j correlation is rho^j."""
    torch.manual_seed(0)
    mean, rounds = torch.randn(20_000), 40
    for rule in (Nesterov(0.7, 0.6), Momentum(0.7, 0.6), SGD(0.7)):
        slots = {"momentum": torch.zeros_like(mean)}
        series, step = mean.clone(), mean
        for _ in range(rounds):
            series = rho * series + math.sqrt(1 - rho**2) * torch.randn_like(series)
            context: Any = type("Context", (), {"scratch": torch.empty_like(series), "out": None})()
            step = rule.update(series.clone(), slots, context)
        measured = float(step @ series) / float(series @ series)
        assert effective_gain(rule, rho) == pytest.approx(measured, rel=0.03)
    assert effective_gain(Nesterov(0.7, 0.9), 1.0) == pytest.approx(7.0)
    assert effective_gain(Nesterov(0.7, 0.9), None) is None


def test_a_sample_is_a_few_thousand_elements_from_all_over() -> None:
    for numel in (0, 1, SAMPLED, SAMPLED + 1, 2 * SAMPLED - 1, 2 * SAMPLED, 1_000_000):
        taken = sample_of(torch.arange(numel))
        assert len(taken) <= SAMPLED and len(taken) >= min(numel, SAMPLED // 3)
        assert not numel or taken[-1] >= 0.99 * (numel - 1)  # to the end
    columns = sample_of(torch.arange(1 << 20)) % 256
    assert len(columns.unique()) == 256


@pytest.mark.parametrize("axes", [{}, INT4_SHIFT], ids=["blocking", "shift, int4"])
def test_all_clusters_have_the_same_figures(axes: dict[str, Any]) -> None:
    told: Told = {}
    run = new_run(told, 3, **axes)
    train(run, 14)
    run.finish()
    of_first = {key[1:]: told[key] for key in told if key[0] == 0}
    assert len(of_first) >= 3
    for cluster in (1, 2):
        assert {key[1:]: told[key] for key in told if key[0] == cluster} == of_first
    assert set(of_first[0, 1]) == {"cluster_cosine", "norm_ratio", "norm_ratio_of"}
    assert all(set(found) == set(FIGURES) for key, found in of_first.items() if key[1] > 1)
    assert all(-0.5 <= found["cluster_cosine"] <= 1.01 for found in of_first.values())


def test_nothing_is_measured_where_the_guard_is_off_or_has_nothing_to_look_at() -> None:
    told: Told = {}
    for method in (
        preset("dreamddp", 2, schedule={"interval": 2}),
        preset("diloco", 2, schedule={"interval": 2}),
    ):
        off: Any = method
        if method.outer_optimizer.keeps_anchor:
            object.__setattr__(off, "guard", "off")
        run = Simulated(WideNet(), adamw, off, 2)
        for loop in run.loops:
            loop._on_sync = lambda event: told.__setitem__((0, 0, 0), dict(event))
        train(run, 4)
        assert told and not set(FIGURES) & set(told[0, 0, 0])


@pytest.fixture
def over_gloo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[HeldTransport] = []

    class Hub(GlooHub):
        def transports(self) -> list[HeldTransport]:
            made.extend(super().transports())
            return made

    monkeypatch.setattr(simulated, "InProcessHub", Hub)
    yield
    for transport in made:
        transport.close()


@pytest.mark.usefixtures("over_gloo")
@pytest.mark.parametrize("axes", [{}, INT4_SHIFT], ids=["blocking", "shift, int4"])
def test_they_are_the_same_over_gloo(axes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    over_gloo: Told = {}
    train(new_run(over_gloo, 2, **axes), 12)
    monkeypatch.undo()
    in_process: Told = {}
    train(new_run(in_process, 2, **axes), 12)
    assert in_process == over_gloo and len(in_process) >= 4


@pytest.mark.parametrize("step", [6, 7, 8])
def test_a_run_that_goes_on_has_the_same_figures(step: int, tmp_path: Path) -> None:
    whole: Told = {}
    first, second = new_run(None, 2, **INT4_SHIFT), new_run(None, 2, **INT4_SHIFT)
    train(new_run(whole, 2, **INT4_SHIFT), 16)
    train(first, step)
    save_all(first, tmp_path)
    resumed: Told = {}
    second = new_run(resumed, 2, **INT4_SHIFT)
    resume(second, first, tmp_path)
    train(second, 16)
    assert resumed and all(whole[key] == found for key, found in resumed.items())


def test_a_cluster_that_is_unlike_the_others_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.002)

    run = Simulated(WideNet(), make, preset("diloco", 3, schedule={"interval": 2}), 3)
    optimizer: Any = run.optimizers[2]
    optimizer.param_groups[0]["lr"] = 0.04
    train(run, 20)
    (told,) = [r.getMessage() for r in caplog.records if "norm_ratio" in r.getMessage()]
    assert told.startswith("fragment 0, round 5: norm_ratio of cluster 2 is ")
    assert "above 3: one cluster sends far more" in told


FINE = ("bf16", "int8", "fp8", "int4")
COARSE = ("fp4_e2m1", "fp4_e3m0", "ternary", "3bit", "2bit", "1bit")
CODES: dict[str, tuple[int, dict[str, Any]]] = {
    "dense": (2, {}),
    **{
        f"{wire}, {mean_wire}, {c} clusters": (c, {"wire": wire, "mean_wire": mean_wire})
        for wire, mean_wire, c in (
            *((wire, "int8", 2) for wire in (*FINE, *COARSE)),
            *(("int4", mean_wire, 4) for mean_wire in ("int8", "int4", *COARSE)),
        )
    },
    "recommended, 2": (2, {"wire": "2bit", "mean_wire": "2bit"}),
    "recommended, 4": (4, {"wire": "2bit", "mean_wire": "2bit"}),
}


@pytest.mark.parametrize("name", CODES)
def test_clusters_that_do_the_same_have_a_cosine_of_one_or_none(name: str) -> None:
    num_clusters, codes = CODES[name]
    axes: dict[str, Any] = {"schedule": {"interval": 2}}
    if codes:
        axes["compression"] = {"type": "quantized", **codes}
    if "recommended" in name:
        axes = {**axes, "schedule": {"interval": 4}, "delay": INT4_SHIFT["delay"]}
    told: Told = {}
    run = new_run(told, num_clusters, **axes)
    while run.num_steps < 16:
        run.train_step(lambda model, cluster, step: loss(model, 0, step))
    cosines = [found["cluster_cosine"] for found in told.values() if "cluster_cosine" in found]
    is_coarse = bool({*codes.values()} & {*COARSE})
    assert bool(cosines) != is_coarse and told
    assert all(cosine == pytest.approx(1, abs=0.05) for cosine in cosines)


def test_factors_and_picked_values_have_no_cosine() -> None:
    for preset_name in ("dilocox", "cocktail_sgd", "eager_fp4", "recommended"):
        method = preset(preset_name, 4)
        assert not method.codes_keep_norms and not method.codes_are_fine
    for preset_name in ("diloco", "opendiloco", "eager"):
        assert preset(preset_name, 4).codes_keep_norms


def test_of_two_clusters_neither_is_the_one_apart() -> None:
    def farthest(*norms: float) -> tuple[float | None, int | None]:
        sums = Sums(1.0, 1.0, 1.0, [norm**2 for norm in norms])
        found = figures_of(sums, SGD(1.0), False)
        return found.norm_ratio, found.farthest

    assert farthest(3.0, 1.5) == farthest(1.5, 3.0) == (0.5, None)
    assert farthest(0.0, 2.0) == (0.0, None) and farthest(0.0, 0.0) == (None, None)
    assert farthest(1.0, 8.0, 2.0) == (pytest.approx(8 / 1.5), 1)
    assert farthest(2.0, 1.0, 2.0, 4.0) == (2.0, 3)  # of two as far, the larger
    ratio, whose = farthest(1.0, 1.0, math.inf)  # beyond fp32: as its largest
    assert whose == 2 and ratio is not None and 1e19 < ratio < math.inf
    assert farthest(1.0, math.nan, 1.0) == (None, None)


def test_a_square_beyond_fp32_is_told_as_such() -> None:
    assert of_bits(bits_of(1e39)) == math.inf and of_bits(bits_of(0.5)) == 0.5


@pytest.mark.parametrize("is_delayed", [False, True])
def test_after_another_mean_that_one_has_applied_all_begin_anew(is_delayed: bool) -> None:
    """What came of it is nowhere: the figures are the same in all clusters, before and after."""
    told: Told = {}
    run = new_run(told, 3, schedule={"interval": 2}, **(DELAYED if is_delayed else {}))
    train(run, 7)
    come_apart(run, 2)
    train(run, 30)
    assert {loop.totals.refused for loop in run.loops} == {1 + is_delayed}
    rounds = [key[2] for key in told if key[0] == 0]
    for each in rounds:
        assert told[0, 0, each] == told[1, 0, each] == told[2, 0, each]
    lack = [r for r in rounds if "autocorrelation" not in told[0, 0, r]]
    assert len(lack) == 2 and lack[1] - lack[0] > 1  # the first of all, and the first one after
    assert run.loops[0].history == run.loops[2].history


@pytest.mark.parametrize("step", [7, 8, 10])
def test_where_one_cluster_comes_back_without_its_samples_all_begin_anew(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does in other shards; none of the others then has more."""
    first, told = new_run(None, 2, **INT4_SHIFT), Told()
    train(first, step)
    save_all(first, tmp_path)
    second = new_run(told, 2, **INT4_SHIFT)
    begin_anew = second.loops[1].guard.begin_anew

    def without(fragment: int, sample: torch.Tensor | None) -> None:
        begin_anew(fragment, None)

    monkeypatch.setattr(second.loops[1].guard, "begin_anew", without)
    resume(second, first, tmp_path)
    assert second.loops[0].history.guard == second.loops[1].history.guard
    train(second, 28)
    of_first, of_second = ({k[1:]: told[k] for k in told if k[0] == m} for m in range(2))
    assert of_first == of_second and second.loops[0].history == second.loops[1].history
    figures = list(of_first.values())
    assert not figures[0] and set(figures[-1]) == {*FIGURES} - {"norm_ratio_of"}


def test_squares_of_other_clusters_are_not_taken_for_those_of_these() -> None:
    run = new_run(None, 2)
    guard, parity = run.loops[0].guard, ParityResult(squares=[[0, 1.0], [2, 1.0]], ids=[0, 1])
    guard.look(0, torch.ones(8), parity, [0, 1, 2])
    assert all(math.isnan(square) for square in parity.sums[3:])
    parity.ids = [0, 2]
    guard.look(0, torch.ones(8), parity, [0, 1, 2])
    assert parity.sums[3:] == [1.0, 0.0, 1.0]


def test_coarse_codes_are_not_taken_for_overshoot() -> None:
    """A mean that brings back what the one before lost takes turns with it by itself."""
    fine, coarse = preset("diloco", 2), preset("recommended", 2)
    told: list[set[str]] = []
    for method in (fine, coarse):
        history = History(1)
        rounds = [judge(0, r, {"autocorrelation": -0.4}, history, method) for r in range(1, 9)]
        told.append({alarm.bound.kind for alarms in rounds for alarm in alarms})
    assert told == [{"overshoot"}, set()]
