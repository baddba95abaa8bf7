"""A cluster that joins looks at its own checkpoint, and does without one that cannot be read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsx.checkpoint.tags import MANIFEST
from dsx.training.joining import Joining


def look(base: Path, tag: str | None = None) -> Path | None:
    joining: Any = SimpleNamespace(
        _saving=SimpleNamespace(own=None), _world=SimpleNamespace(cluster_id=1, rank=0)
    )
    Joining.look_in(joining, base, tag)
    return joining._saving.own


def write(base: Path, tag: str, manifest: Any) -> Path:
    folder = base / "cluster_1" / tag
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_the_newest_complete_one_is_taken_or_the_one_that_is_wanted(tmp_path: Path) -> None:
    first = write(tmp_path, "a", {"step": 20})
    write(tmp_path, "b", {"step": 10})
    assert look(tmp_path) == first
    assert look(tmp_path, "b") == tmp_path / "cluster_1" / "b"
    assert look(tmp_path / "nowhere") is None


def test_a_join_does_without_what_cannot_be_read_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        assert look(tmp_path, "gone") is None
        assert "it has no complete 'gone'" in caplog.text
        write(tmp_path, "c", {})
        assert look(tmp_path) is None
        assert f"all is taken from the others, and nothing from {tmp_path}: 'step'" in caplog.text

        def fail(*args: Any) -> None:
            raise PermissionError("Permission denied")

        monkeypatch.setattr("dsx.training.joining.newest_of_own", fail)
        assert look(tmp_path) is None
        assert "Permission denied" in caplog.text
