"""What is told of settings that are others than those a checkpoint was saved with.

The files of tests/fixtures/default_fragments_0.2.0 were written by 0.2.0 (its commit 7b1f627). Its
presets had four fragments where they have "auto" now. Cluster 0 of two, `TinyNet`, SGD, step 2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dsx.checkpoint.outer_state import load_state
from dsx.comm.topology import RankInfo
from dsx.config.schema import resolve_method
from tests.checkpoint.saved import save_state
from tests.simulated import Simulated
from tests.tiny import TinyNet, mean_loss

FIXTURES = Path(__file__).parents[1] / "fixtures" / "default_fragments_0.2.0"
PLACE = RankInfo(0, 2, 0, 1)
STREAM = {"schedule": {"interval": 4}, "delay": {"steps": 2}}
# Simulated transfers take no time, and nothing here is large enough to be factored.
pytestmark = pytest.mark.filterwarnings("ignore::dsx.SettingWarning")


def start(name: str, overrides: dict[str, Any]) -> tuple[Simulated, dict[str, Any]]:
    method, axes = resolve_method(name, overrides, 2)
    sgd = torch.optim.SGD
    return Simulated(TinyNet(), lambda model: sgd(model.parameters(), lr=0.2), method, 2), axes


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [m.partition(" was saved with ")[2] for m in caplog.messages if "was saved with" in m]


@pytest.mark.parametrize("name", ["streaming_diloco", "cocodc", "dilocox"])
def test_four_fragments_of_0_2_go_on_as_auto_without_a_word(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, axes = start(name, {})
    assert axes["fragments"]["num_fragments"] == "auto"
    load_state(run.loops[0], FIXTURES / name, PLACE, axes)
    assert run.loops[0].history.step == 2 and len(run.loops[0].adapter.fragments) == 4
    assert told(caplog) == []


def test_what_has_changed_beside_them_is_told(caplog: pytest.LogCaptureFixture) -> None:
    overrides = {"delay": {"alpha": 0.25}, "outer_optimizer": {"lr": 0.3, "momentum": 0.8}}
    run, axes = start("streaming_diloco", overrides)
    load_state(run.loops[0], FIXTURES / "streaming_diloco", PLACE, axes)
    assert sorted(told(caplog)) == [
        "delay.alpha=0.5; going on with 0.25",
        "outer_optimizer.lr=0.4; going on with 0.3",
        "outer_optimizer.momentum=0.9; going on with 0.8",
    ]


@pytest.mark.parametrize("saved", [4, "auto", None])
@pytest.mark.parametrize("resumed", [4, "auto", None])
def test_every_spelling_of_the_same_fragments_is_the_same(
    saved: Any, resumed: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, axes = start("streaming_diloco", {**STREAM, "fragments": {"num_fragments": saved}})
    first.train_step(mean_loss)
    save_state(first.loops[0], tmp_path, PLACE, "run-a", axes, {})
    second, axes = start("streaming_diloco", {**STREAM, "fragments": {"num_fragments": resumed}})
    load_state(second.loops[0], tmp_path, PLACE, axes)
    assert told(caplog) == []


def test_another_number_is_told_where_parameters_lie_on_other_stages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, axes = start("streaming_diloco", {**STREAM, "fragments": {"num_fragments": 2}})
    save_state(first.loops[0], tmp_path, PLACE, "run-a", axes, {})
    second, axes = start("streaming_diloco", STREAM)
    load_state(second.loops[0], tmp_path, PLACE, axes, is_repartitioned=True)
    assert told(caplog) == ["fragments.num_fragments=2; going on with 4"]
