"""Writing behind the training: in order, and not lost after the end."""

from __future__ import annotations

import pytest

from dsx.telemetry.behind import Behind


def test_what_comes_after_the_end_is_done_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    behind, done = Behind(), list[int]()
    for number in range(50):
        behind.do(lambda number=number: done.append(number))
    behind.close()
    assert done == list(range(50))
    behind.do(lambda: done.append(50))
    behind.flush()
    assert done[-1] == 50
    behind.do(lambda: 1 / 0)
    assert "cannot be written: division by zero" in capsys.readouterr().err
