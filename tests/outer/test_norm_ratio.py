"""A contribution far larger than the others' is named and left out, like one with a NaN."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsx.checkpoint.outer_state import load_state
from dsx.comm.topology import RankInfo
from dsx.config.files import ConfigError
from dsx.config.schema import load_config, preset
from dsx.outer.parity_check import ParityResult, too_large
from dsx.outer.recovery import NonFiniteError
from tests.checkpoint.saved import save_state
from tests.levels import in_turn
from tests.outer.test_parity_check import sgd
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, TinyNet, mean_loss


@pytest.mark.parametrize(
    ("squares", "silent", "found"),
    [
        ([1.0, 1.0, 1.0], [], []),
        ([1.0, 0.9e6, 1.0], [], []),
        ([1.0, 1.1e6, 1.0], [], [1]),
        ([1.0, 1.1e6], [], [1]),
        ([1.1e6, 1.0], [], [0]),
        ([1.0, 1.0, 1e9, 1e12], [], [2, 3]),
        ([1e9, 1e9, 1.0], [], []),  # most are so large: it is the other one that is unusual
        ([1.0, math.inf, 1.0], [], [1]),  # of a square beyond fp32
        ([math.inf, math.inf], [], []),
        ([0.0, 1.0, 0.0], [], []),  # zeros say nothing of what is usual
        ([0.0, 1.0, 1e7], [], [2]),
        ([1e-12, 1.0, 1.0], [0], []),  # nor does who has taken no step
        ([1e-12, 1.0], [0], []),
        ([math.nan, 1.0, 1e7], [], [2]),
        ([1e7], [], []),
    ],
)
def test_who_is_too_large(squares: list[float], silent: list[int], found: list[int]) -> None:
    parity = ParityResult(idle_in=silent, squares=[[i, s] for i, s in enumerate(squares)])
    assert too_large(parity, 1000.0) == found
    assert too_large(parity, None) == []
    parity = ParityResult(refused_by=silent, squares=parity.squares)
    assert too_large(parity, 1000.0) == found


def blow_up(run: Simulated, factor: float, cluster: int = 1) -> None:
    """Take an inner step, and lead one cluster's model away from its anchor."""
    step = run.num_steps + 1
    for m, model in enumerate(run.models):
        run.optimizers[m].zero_grad()
        mean_loss(model, m, step).backward()
        run.optimizers[m].step()
    with torch.no_grad():
        for parameter in run.models[cluster].parameters():
            parameter += factor
    run.step()


def run_with(factor: float, name: str = "diloco", **fields: Any) -> Simulated:
    method = replace(ALL_CASES[name].method(3), **fields)
    run = Simulated(TinyNet(), sgd, method, 3)
    for _ in range(2 * method.schedule.interval - 1):
        run.train_step(mean_loss)
    blow_up(run, factor)
    return run


@pytest.mark.parametrize(
    ("name", "guard"),
    in_turn(
        ["diloco", "streaming_diloco", "diloco_delayed", "cocodc", "eager", "co2", "dilocox"],
        ["warn", "off"],
    ),
)
def test_it_is_left_out_by_all_and_its_cluster_goes_on_from_the_anchor(
    name: str, guard: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_with(1e6, name, guard=guard)
    with caplog.at_level(logging.ERROR):
        for _ in range(30):
            run.train_step(mean_loss)
            for loop in run.loops:
                assert loop.history == run.loops[0].history
                for own, first in zip(loop.state.anchor, run.loops[0].state.anchor, strict=True):
                    assert own.abs().max() < 100 and torch.equal(own, first)
        run.finish()
    assert "cluster 1 sent values of more than 1000 times the norm of the others'" in caplog.text
    assert run.loops[0].totals.refused > 0
    assert all(p.abs().max() < 100 for p in run.models[1].parameters())


@pytest.mark.parametrize(("factor", "fields"), [(1.0, {}), (1e6, {"max_norm_ratio": None})])
def test_what_is_not_so_large_or_allowed_is_taken(factor: float, fields: Any) -> None:
    run = run_with(factor, **fields)
    assert run.loops[0].totals.refused == 0
    assert (run.loops[0].state.anchor[0].abs().max() > 1e4) == (factor > 1)


def test_a_cluster_that_stays_too_large_ends_the_run() -> None:
    run = run_with(1e6)
    with pytest.raises(NonFiniteError, match=r"cluster 1 sent .* 1000 times .* \d rounds in a row"):
        for _ in range(60):
            blow_up(run, 1e6)


def test_one_that_is_not_finite_is_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    run = Simulated(TinyNet(), sgd, preset("diloco", schedule={"interval": 2}), 4)
    run.train_step(mean_loss)
    run.models[2].layers[0].bias.data[0] = math.nan
    with caplog.at_level(logging.ERROR):
        blow_up(run, 1e6)
    said = "cluster 2 sent values that are not finite, and cluster 1 sent values of more than"
    assert said in caplog.text


def test_a_resume_with_such_a_round_under_way_goes_on_alike(tmp_path: Path) -> None:
    method = preset("diloco_delayed", schedule={"interval": 4})
    run = Simulated(TinyNet(), sgd, method, 3)
    for _ in range(7):
        run.train_step(mean_loss)
    blow_up(run, 1e6)
    for m, loop in enumerate(run.loops):
        save_state(loop, tmp_path / str(m), RankInfo(m, 3, 0, 1), "a run", {}, {})
    second = Simulated(TinyNet(), sgd, method, 3)
    for m, loop in enumerate(second.loops):
        load_state(loop, tmp_path / str(m), RankInfo(m, 3, 0, 1), {})
        second.models[m].load_state_dict(run.models[m].state_dict())
    for _ in range(8):
        run.train_step(mean_loss)
        second.train_step(mean_loss)
        assert run.loops[1].history == second.loops[1].history
    assert run.loops[1].totals.refused == 1
    for ours, theirs in zip(run.parameters(), second.parameters(), strict=True):
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


@pytest.mark.parametrize("given", [1, 0, "much", -5])
def test_a_ratio_that_is_none_is_refused(given: Any) -> None:
    clusters = {"num_clusters": 2, "max_norm_ratio": given}
    with pytest.raises(ConfigError, match="max_norm_ratio"):
        load_config({"dsx": {"preset": "diloco", "clusters": clusters}})
