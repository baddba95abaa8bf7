"""The comparison names what differs, and fails for it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "compare.py"
RUN = {
    "weights": {"end": "a1"},
    "state": {"end": ["b1", "b2"]},
    "records": {"syncs": [{"launched_step": 4, "mean_norm": 0.25}]},
    "values": {"bytes_sent": 1000},
}
EVIDENCE: dict[str, Any] = {
    "about": {"tree": "somewhere", "torch": "2"},
    "parts": {"gloo": {"eager": {**RUN, "resumed": copy.deepcopy(RUN)}}},
}


def compare(base: Path, change: Callable[[dict[str, Any]], Any]) -> tuple[int, str]:
    changed = copy.deepcopy(EVIDENCE)
    change(changed)
    (base / "a.json").write_text(json.dumps(EVIDENCE))
    (base / "b.json").write_text(json.dumps(changed))
    command = [sys.executable, str(SCRIPT), str(base / "a.json"), str(base / "b.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_same_is_equal(tmp_path: Path) -> None:
    status, printed = compare(tmp_path, lambda e: e["about"].update(tree="elsewhere"))
    assert status == 0, printed
    assert printed.splitlines()[-2].split() == ["gloo", "2", "2", "2", "2", "2", "12"]
    assert printed.splitlines()[-1] == "equal"


def eager(evidence: dict[str, Any]) -> Any:
    return evidence["parts"]["gloo"]["eager"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda e: eager(e)["weights"].update(end="a2"), "eager > weights > end: 'a1' and 'a2'"),
        (lambda e: eager(e)["state"]["end"].pop(), "eager > state > end: 2 entries and 1"),
        (
            lambda e: eager(e)["resumed"]["records"]["syncs"][0].update(mean_norm=0.5),
            "eager, resumed > records > syncs[0] > mean_norm: 0.25 and 0.5",
        ),
        (lambda e: eager(e)["values"].update(bytes_sent=1000.0), "1000 and 1000.0"),
        (lambda e: eager(e)["values"].update(syncs=1), "values > syncs: only in the second"),
        (lambda e: e["parts"].clear(), "gloo > eager: only in the first file"),
        (lambda e: e["parts"].update(megatron={"eager": RUN}), "megatron > eager: only in the sec"),
        (lambda e: e["about"].update(torch="3"), "torch is another"),
        (
            lambda e: eager(e)["resumed"]["values"].update({"not as uninterrupted": ["syncs"]}),
            "in the second file, not as uninterrupted: syncs",
        ),
    ],
)
def test_every_difference_is_named(
    change: Callable[[dict[str, Any]], Any], named: str, tmp_path: Path
) -> None:
    status, printed = compare(tmp_path, change)
    assert status == 1
    assert named in printed
