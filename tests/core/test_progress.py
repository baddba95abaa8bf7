"""What is said of something that takes long."""

from __future__ import annotations

import pytest

from dsx.core.progress import Progress, as_count


def test_progress_says_how_much_how_fast_and_how_long(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    progress = Progress("masters of cluster 0", 10_000_000_000, True, lambda: now[0])
    silent = Progress("masters of cluster 0", 10_000_000_000, False, lambda: now[0])
    for second in range(1, 26):
        now[0] = float(second)
        for one in (progress, silent):
            one.moved(100_000_000)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "masters of cluster 0: 1 GB of 10 GB, 100 MB/s, 90 s left",
        "masters of cluster 0: 2 GB of 10 GB, 100 MB/s, 80 s left",
    ]


def test_pieces_of_work_are_told_as_numbers_and_soon(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    progress = Progress("candidates", 5000, True, lambda: now[0], 2.0, as_count)
    for tenth in range(1, 31):
        now[0] = tenth / 10
        progress.moved(100)
    assert [r.getMessage() for r in caplog.records] == [
        "candidates: 2,000 of 5,000, 1,000/s, 3 s left"
    ]
