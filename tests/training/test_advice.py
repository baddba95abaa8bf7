"""What the preset `recommended` says of a run that is too short, or whose rate stays up."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import dsx
from dsx.config.schema import DsxConfig, load_config
from dsx.training.advice import Advice
from tests.distributed import run_distributed
from tests.tiny import TinyNet, batch


def config(**block: Any) -> DsxConfig:
    return load_config({"dsx": {"preset": "recommended", "clusters": {"num_clusters": 2}, **block}})


def told(
    caplog: pytest.LogCaptureFixture,
    block: DsxConfig,
    rates: list[float],
    begins: int = 0,
    total: int | None = None,
) -> list[str]:
    """Return what is said of a run whose steps have these rates."""
    left = iter([*rates, *rates[-1:]])
    advice = Advice(block, lambda: next(left, 1.0), lambda: total, speaks=True)
    advice.begin(begins)
    with caplog.at_level(logging.WARNING):
        for _ in rates:
            advice.pass_boundary()
        advice.end(len(rates))
    return [record.getMessage() for record in caplog.records]


def test_a_long_run_that_decays_hears_nothing(caplog: pytest.LogCaptureFixture) -> None:
    decays = [1 - step / 8000 for step in range(8000)]
    assert told(caplog, config(), decays) == []


def test_a_short_one_is_told_once_and_before_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    (said,) = told(caplog, config(), [1.0, 0.0, 0.0], total=1600)
    assert "this run has 1600 steps, 100 rounds of 16" in said
    assert "500 rounds or more (8000 steps)" in said


def test_where_nobody_tells_a_length_it_is_that_of_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (said,) = told(caplog, config(schedule={"interval": 32}), [1.0] * 10 + [0.05] * 10)
    assert "this run has had 20 steps, 1 rounds of 32" in said


def test_a_rate_that_stays_up(caplog: pytest.LogCaptureFixture) -> None:
    (said,) = told(caplog, config(), [0.5, 2.0, 1.0], total=8000)
    assert "has ended at 1, 50 % of its largest" in said


def test_of_a_part_of_a_run_the_largest_rate_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, config(), [0.5], begins=7999, total=8000) == []


def test_other_presets_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    block = load_config({"dsx": {"preset": "diloco", "clusters": {"num_clusters": 2}}})
    assert told(caplog, block, [1.0] * 3, total=3) == []


def test_a_run_without_a_step_ends_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, config(), []) == []


def test_what_a_trainer_tells_of_its_length_is_heard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Through a handle, as the frameworks tell it."""
    [said] = run_distributed(say_a_length, 1, str(tmp_path))
    assert "this run has 160 steps, 10 rounds of 16" in said


def say_a_length(run: str) -> str:
    import io

    stream = io.StringIO()
    logging.getLogger("dsx").addHandler(logging.StreamHandler(stream))
    block = {"dsx": {"preset": "recommended", "clusters": {"num_clusters": 1},
                     "fragments": {"num_fragments": 2}, "metrics": {"dir": run}}}  # fmt: skip
    dsx.init_distributed(block)
    model = TinyNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = dsx.attach(model, optimizer, config=block)
    handle.progress.note({"total_steps": 160})
    optimizer.zero_grad()
    model(*batch(0, 1)).backward()
    optimizer.step()
    return stream.getvalue()
