"""The line that says how a run is doing."""

from __future__ import annotations

import pytest

from dsx.telemetry.progress import Progress


def test_the_line_names_what_is_known_and_leaves_out_the_rest() -> None:
    progress = Progress(1, 5.0, speaks=True)
    progress.begin(100, 1_000_000)
    progress.pass_boundary(101, 1_000_000, 0.25)
    assert progress.line(120, 6_000_000, 10.0) == (
        "dsx: cluster 1, step 120, 2 steps/s, sends 4 Mbit/s, 97.5 % hidden"
    )
    progress.note({"loss": 2.5, "tokens": 4096, "total_steps": 1320})
    assert progress.line(120, 6_000_000, 10.0) == (
        "dsx: cluster 1, step 120 of 1,320, 2 steps/s, 410 tokens/s, loss 2.5, sends 4 Mbit/s, "
        "97.5 % hidden, 10 min left"
    )


@pytest.mark.parametrize(
    ("seconds", "speaks", "lines"),
    [(1e-9, True, 2), (0.0, True, 0), (1e-9, False, 0), (60, True, 0)],
)
def test_it_is_written_every_so_often(
    seconds: float, speaks: bool, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(0, seconds, speaks)
    progress.begin(4)  # of a run that goes on, and has sent something before
    for step in (5, 6):
        progress.pass_boundary(step, 9_000_000, 0.0)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == lines
    assert all("sends 0 Mbit/s" in line for line in told)
