"""`dsx bench e2e`: its table, its JSON and its figure."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dsx.bench.e2e.bench import Row
from dsx.bench.e2e.show import TARGETS, as_json, draw, figure_of, show


def row(method: str, **changed: Any) -> Row:
    values: dict[str, Any] = {
        "ratio": 32.0, "megabits_per_second": 3.0, "shape": "4,64,64,128",
        "method": method, "interval": 40,
        "delay_steps": 0, "steps": 160, "is_overlapped": True, "step_seconds": 0.1,
        "ceiling_seconds": 0.099, "tokens_per_second": 40960.0, "utilization": 0.99,
        "predicted_utilization": 1.0, "exposed_seconds": 0.04, "wire_bytes": 1047,
        "payload_bytes": 1000, "planned_bytes": 1000, "validation_loss": 2.5,
    }  # fmt: skip
    return Row(**{**values, **changed})


def text_of(*rows: Row) -> str:
    console = Console(width=140, record=True, file=StringIO())
    show(rows, console)
    return console.export_text()


def test_what_misses_a_target_is_named_with_its_figure() -> None:
    good = text_of(row("dilocox"), row("eager"))
    assert good.count("met ") == len(TARGETS) and "MISS" not in good
    bad = text_of(
        row("dilocox", utilization=0.85),
        row("eager", wire_bytes=1070, payload_bytes=1001),
        row("co2", is_overlapped=False, utilization=0.5, predicted_utilization=0.5),
    )
    assert "MISS utilization of overlapped presets at least 97 %: dilocox 85.0%" in bad
    assert "MISS bytes on the wire at most 1.06 of the payload: eager 1.069" in bad
    assert "MISS payload equal to the planner's, to the byte: eager 1" in bad
    assert "MISS utilization within 5 % of the planner's: dilocox 15.0%" in bad


def test_links_are_held_against_gloo_by_what_is_waited() -> None:
    over_gloo = row("diloco", wait_seconds=2.0, wait_half_range=0.1)
    link: dict[str, Any] = {"transport": "link", "security": "curve"}
    good = text_of(over_gloo, row("diloco", wait_seconds=2.05, wait_half_range=0.02, **link))
    assert "met  links wait no longer than gloo" in good and "diloco, link/curve" in good
    assert "2.00 ±0.10" in good
    bad = text_of(over_gloo, row("diloco", wait_seconds=2.2, wait_half_range=0.0, **link))
    assert "MISS links wait no longer than gloo" in bad
    assert "diloco, link/curve +0.200 s of 0.100 s" in bad
    alone = text_of(row("diloco", wait_seconds=2.0, **link))
    assert "-    links wait no longer" in alone
    assert "links wait" not in text_of(over_gloo)


def test_rows_as_json_and_as_a_figure(tmp_path: Path) -> None:
    rows = [row("eager"), row("dilocox", ratio=350.0, planned_bytes=None)]
    assert [r["method"] for r in json.loads(json.dumps(as_json(rows)))] == ["eager", "dilocox"]
    draw(rows, tmp_path / "e2e.png")
    assert (tmp_path / "e2e.png").read_bytes().startswith(b"\x89PNG")


def test_every_bar_is_beside_the_name_of_its_method() -> None:
    rows = [
        row("data_parallel", utilization=0.03),
        row("eager", utilization=0.9),
        row("dreamddp", utilization=0.5),
        row("data_parallel", ratio=350.0, utilization=0.01),
        row("dreamddp", ratio=350.0, utilization=0.4),  # eager is missing
    ]
    figure = figure_of(rows)
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]  # of both panels
    assert len(names) == 3
    for panel, ratio in zip(figure.axes, (32.0, 350.0), strict=True):
        bars = {
            names[round(bar.get_y() + bar.get_height() / 2)]: bar.get_width() / 100
            for bar in panel.patches
        }
        assert bars == pytest.approx({r.method: r.utilization for r in rows if r.ratio == ratio})
