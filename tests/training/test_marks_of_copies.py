"""What has diverged says so at the remote place, too, where the run ends on it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dsx.checkpoint.diverged import mark_diverged
from dsx.training import copying
from tests.training.test_copying import (
    Clusters,
    Guarded,
    allow,
    guarded,  # noqa: F401 - a fixture
)


@pytest.mark.parametrize("is_busy", [False, True])
def test_what_diverges_as_a_run_ends_says_so_there(tmp_path: Path, is_busy: bool) -> None:
    """Where the script ends by an error, and each request to the remote place takes its time."""
    clusters = Clusters(tmp_path)
    allow(0, 1)
    clusters.save(10)
    clusters.pass_until(("copied", 0, 10), ("copied", 1, 10))
    clusters.pass_boundary()
    Guarded.may = {m: threading.Event() for m in range(2)}
    if is_busy:
        clusters.save(20)
        clusters.pass_boundary()
    for m, one in enumerate(clusters.copying):
        mark_diverged(tmp_path / f"cluster_{m}", 5, "a")
        one.mark(tmp_path / f"cluster_{m}" / "step10")
    timer = threading.Timer(0.2, allow, (0, 1))
    timer.start()
    for one in clusters.copying:
        one.close()
    for m in range(2):
        troubles = {tag: told["trouble"] for tag, told in clusters.remote.tags(m).items()}
        assert troubles == {"step10": "diverged since step 5"}
    timer.join()


def test_an_end_waits_a_while_for_a_mark_and_says_what_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_MARK_SECONDS", 0.05)
    clusters = Clusters(tmp_path)
    allow(0, 1)
    clusters.save(10)
    clusters.pass_until(("copied", 0, 10), ("copied", 1, 10))
    Guarded.may = {m: threading.Event() for m in range(2)}
    mark_diverged(tmp_path / "cluster_0", 5, "a")
    clusters.copying[0].mark(tmp_path / "cluster_0" / "step10")
    clusters.copying[0].close()
    assert "guarded://run/cluster_0/step10 could not be marked (nothing was heard" in caplog.text
    assert "delete it by hand" in caplog.text
    allow(0, 1)
