"""One line that hangs holds up the copies of all clusters, and all say so, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsx.training.silent_copies import SECONDS, Silence
from tests.training.test_copying import (
    Clusters,
    allow,
    guarded,  # noqa: F401 - a fixture
)


def test_a_line_that_hangs_is_told_once_by_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clusters, now = Clusters(tmp_path), [0.0]
    for m, one in enumerate(clusters.copying):
        one._silence = Silence(m, lambda: now[0])
    clusters.save(10)
    clusters.pass_boundary()
    allow(0)
    clusters.pass_until(("copied", 0, 10))
    for _ in range(3):
        clusters.pass_boundary()
    now[0] = SECONDS
    clusters.pass_boundary()
    assert len(clusters.told) == 1 and "have not said" not in caplog.text
    for seconds in (SECONDS + 1, 5 * SECONDS):
        now[0] = seconds
        clusters.pass_boundary()
        assert [one[:3] for one in clusters.told[1:]] == [("not copied", 1, 10)]
        assert clusters.told[1][3].startswith("no byte has gone there for 1800 s")
        assert caplog.text.count("clusters [1] have not said for 1800 s") == 1
    clusters.save(20)
    allow(1)
    clusters.pass_until(("copied", 1, 10), ("copied", 0, 20), ("copied", 1, 20))
    clusters.close()


def test_words_that_travel_long_are_waited_for_longer() -> None:
    now = [0.0]
    silence = Silence(0, lambda: now[0])
    now[0] = SECONDS - 1
    silence.moved()
    now[0] += SECONDS
    assert silence.longer_than({0, 1}) is None
    silence.is_done_here()
    now[0] += 5 * SECONDS
    assert silence.longer_than({0, 1}) is None  # one's own word is still under way
    silence.told_by(0)
    now[0] += 6 * SECONDS
    assert silence.longer_than({1}) is None and silence.longer_than(()) is None
    now[0] += 1
    assert silence.longer_than({1}) == 6 * SECONDS and silence.longer_than({1}) is None
