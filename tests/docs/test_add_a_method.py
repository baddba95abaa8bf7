"""The page that adds a method: its file is installed, found, and held to what every method is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsx.core import registry
from tests import tiny
from tests.docs.pages import ROOT, blocks
from tests.method import test_conformance as conformance

PAGE = "docs/develop/add-a-method.md"
CHECKS = [
    (conformance.test_equals_the_reference, (1, 2, 3, 5)),
    (conformance.test_equals_the_reference_with_sgd, (1, 2, 3, 5)),
    (conformance.test_anchors_are_bit_identical_at_every_step, (2, 3, 5)),
    (conformance.test_goes_on_after_finish_as_the_reference, ()),
    (conformance.test_is_deterministic, ()),
    (conformance.test_state_takes_what_the_method_declares, ()),
]


def write_files(folder: Path) -> None:
    for block in blocks(PAGE):
        if block.title:
            (folder / block.title).write_text(block.text)


@pytest.fixture
def row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Import the page's method and put its row into the table, for one test."""
    write_files(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = {kind: dict(names) for kind, names in registry._known.items()}
    monkeypatch.setattr(registry, "_known", known)
    import adagrad  # type: ignore[import-not-found]  # noqa: F401
    import case  # type: ignore[import-not-found]

    monkeypatch.setitem(tiny.ALL_CASES, case.CASE.preset, case.CASE)
    yield case.CASE.preset
    del sys.modules["adagrad"], sys.modules["case"]


@pytest.mark.ci
def test_one_row_takes_it_through_conformance(row: str) -> None:
    for check, numbers in CHECKS:
        for arguments in [(number,) for number in numbers] or [()]:
            check(row, *arguments)


def test_no_check_of_conformance_is_left_out() -> None:
    """The golden trajectory is a file of its own; the others do not go over the table."""
    others = {
        "test_golden_trajectory",
        "test_every_preset_is_in_the_table",
        "test_a_cluster_that_goes_another_way_is_seen",
    }
    found = {name for name in vars(conformance) if name.startswith("test_")}
    assert found - others == {check.__name__ for check, _ in CHECKS}


@pytest.mark.ci
def test_it_is_found_once_it_is_installed(tmp_path: Path) -> None:
    """By `dsx config reference`, which imports no file of ours."""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    write_files(source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    install = [*pip, "--no-build-isolation", "--target", str(site), str(source)]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)])}
    command = [sys.executable, "-c", "from dsx.cli import app; app()", "config", "reference"]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "### outer_optimizer: adagrad" in shown.stdout
    assert "| `eps` | number | `0.001` |  | What is added to the root" in shown.stdout
    assert "| `fedadagrad` | DiLoCo with Adagrad's outer step. |" in shown.stdout
