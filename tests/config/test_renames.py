"""Old spellings of the configuration are read, with one warning; in files of dsx without."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from dsx.config.renames import stored_axes
from dsx.config.schema import ConfigError, load_config, resolve_method
from dsx.core import renamed
from dsx.core.renamed import RenamedWarning
from tests.flags import read_flags


@pytest.fixture(autouse=True)
def nothing_told_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed, "_told", set())


def test_delays_have_the_fields_names() -> None:
    with pytest.warns(RenamedWarning, match=r"dsx.delay.type='replace' is now 'blocking'"):
        old = resolve_method("diloco", {"delay": {"type": "replace"}})
    assert old == resolve_method("diloco", {})
    with pytest.warns(RenamedWarning, match=r"dsx.delay.type='blend' is now 'streaming'"):
        old = resolve_method("cocodc", {"delay": {"type": "blend", "steps": 3}})
    assert old == resolve_method("cocodc", {"delay": {"type": "streaming", "steps": 3}})
    assert old[1]["delay"] == {"type": "streaming", "steps": 3, "alpha": 0.5}


def test_one_warning_per_spelling_and_process() -> None:
    block = {"preset": "diloco", "clusters": {"num_clusters": 2}, "delay": {"type": "replace"}}
    with pytest.warns(RenamedWarning) as told:
        load_config({"dsx": block})
        load_config({"dsx": block})
    assert len(told) == 1


def test_flags_are_the_same() -> None:
    two = ["--dsx-preset", "streaming_diloco", "--dsx-num-clusters", "2"]
    with pytest.warns(RenamedWarning, match="'streaming'"):
        old = read_flags([*two, "--dsx-delay-type", "blend", "--dsx-delay-alpha", "0.25"])
    assert old.method == read_flags([*two, "--dsx-delay-alpha", "0.25"]).method


OLD: dict[str, Any] = {
    "train_batch_size": 8,
    "dsx": {
        "preset": "diloco",
        "clusters": {"num_clusters": 2},
        "delay": {"type": "replace"},
    },
}


def test_the_warning_points_to_the_line_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(OLD, indent=1))
    line = 1 + path.read_text().splitlines().index('   "type": "replace"')
    shown = f"""{path}:{line}: RenamedWarning: dsx.delay.type='replace' is now 'blocking'; the old \
spelling still works, until dsx 0.4
  "type": "replace"
"""
    said = subprocess.run(
        [sys.executable, "-c", f"import dsx; dsx.load_config({str(path)!r})"],
        capture_output=True, text=True,
    ).stderr  # fmt: skip
    assert said == shown
    with pytest.warns(RenamedWarning) as told:
        read_flags(["--dsx-config", str(path)])
    assert [(w.filename, w.lineno) for w in told] == [(str(path), line)]


def test_the_warning_points_to_the_program_or_the_command_line() -> None:
    with pytest.warns(RenamedWarning) as told:
        load_config(OLD)
    assert told[0].filename == __file__
    assert "load_config(OLD)" in Path(__file__).read_text().splitlines()[told[0].lineno - 1]
    two = ["--dsx-preset", "streaming_diloco", "--dsx-num-clusters", "2"]
    with pytest.warns(RenamedWarning) as told:
        read_flags([*two, "--dsx-delay-type", "blend"])
    assert told[0].filename == "<command line>"
    said = subprocess.run(
        [sys.executable, "-m", "dsx", "bench", "link", "--clusters", "9"],
        capture_output=True, text=True,
    ).stderr  # fmt: skip
    assert said.splitlines()[0].startswith("<command line>:1: RenamedWarning: dsx bench link is")
    assert len(said.splitlines()) == 2, "no line of source, and the command's own message"


def test_what_a_run_left_behind_is_read_without_a_word() -> None:
    left = {"delay": {"type": "blend", "steps": 2}, "fragments": {"by": "model"}, "link": {"a": 1}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stored_axes(left) == {**left, "delay": {"type": "streaming", "steps": 2}}
        assert stored_axes({"delay": {"type": ["x"]}}) == {"delay": {"type": ["x"]}}


def test_other_axes_have_no_such_names() -> None:
    with pytest.raises(ConfigError, match=r"dsx.schedule.type='replace' is not known"):
        resolve_method("diloco", {"schedule": {"type": "replace"}})
