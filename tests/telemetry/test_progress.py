"""The line that says how a run is doing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from dsx.telemetry.progress import Progress


def sync(waited: float, transfer: float | None, sent: int = 1_250_000) -> dict[str, float | None]:
    return {"wait_seconds": waited, "transfer_seconds": transfer, "bytes_sent": sent}


def test_the_line_names_what_is_known_and_leaves_out_the_rest() -> None:
    progress = Progress(1, 5.0, speaks=True, num_senders=2)
    progress.begin(100)
    progress.pass_boundary(101, 0.25)
    assert progress.line(120, 10.0) == (
        "dsx: cluster 1, step 120, 2 steps/s, sends 0 Mbit/s, utilization 97.5 %"
    )
    progress.note_sync(sync(0.0, 3.0))
    progress.note_sync(sync(0.25, 1.0))
    progress.note({"loss": 2.5, "tokens": 4096, "total_steps": 1320})
    assert progress.line(120, 10.0) == (
        "dsx: cluster 1, step 120 of 1,320 (9 %), 2 steps/s, 410 tokens/s, loss 2.5, sends 4 "
        "Mbit/s, 94 % of the transfers hidden, utilization 97.5 %, 10 min left"
    )


def test_what_is_seen_is_said_where_nobody_tells_it() -> None:
    progress = Progress(0, 5.0, speaks=True)
    for loss in (3.0, torch.tensor(2.5)):
        progress.see(loss=loss, tokens=4096)
    progress.see(tokens=0)
    assert "819 tokens/s, loss 2.5, sends" in progress.line(20, 10.0)
    progress.note({"loss": 1.5, "tokens": 10})
    assert "1 tokens/s, loss 1.5, sends" in progress.line(20, 10.0)
    progress.begin(20)
    assert "loss" not in progress.line(21, 10.0) and "tokens" not in progress.line(21, 10.0)


def test_a_blocking_method_hides_nothing_however_rarely_it_exchanges() -> None:
    progress = Progress(0, 5.0, speaks=True)
    progress.begin(0)
    progress.note_sync(sync(0.5, 0.5))
    progress.note_sync(sync(0.1, None))
    progress.pass_boundary(20, 0.6)
    assert "0 % of the transfers hidden, utilization 94.0 %" in progress.line(20, 10.0)


@pytest.mark.parametrize(
    ("seconds", "speaks", "lines"),
    [(1e-9, True, 2), (0.0, True, 0), (1e-9, False, 0), (60.0, True, 0)],
)
def test_it_is_written_every_so_often(
    seconds: float, speaks: bool, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(0, seconds, speaks)
    progress.begin(4)
    for step in (5, 6):
        progress.pass_boundary(step, 0.0)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == lines
    assert all("hidden" not in line for line in told)  # nothing was exchanged


def test_a_loss_that_a_device_still_computes_is_said_once_it_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a double of what copies numbers to the host: the training thread does not wait for one."""
    asked: list[Any] = []

    class Late:
        are_there = False

        def __init__(self, record: Mapping[str, Any]) -> None:
            asked.append(record["loss"].shape)
            self._record = record

        def read(self) -> dict[str, float]:
            assert self.are_there, "waits for the device"
            return {"loss": self._record["loss"].item()}

    monkeypatch.setattr("dsx.telemetry.progress.HostNumbers", Late)
    monkeypatch.setattr("dsx.telemetry.progress._LOSS_SECONDS", 0.0)
    progress = Progress(0, 1e-9, speaks=True, is_shown=True)
    progress.see(loss=torch.tensor([2.5]))
    progress.pass_boundary(1, 0.0)
    progress.see(loss=torch.tensor(1.5))
    progress.pass_boundary(2, 0.0)
    assert progress.loss is None and capsys.readouterr().err == ""
    Late.are_there = True
    progress.pass_boundary(3, 0.0)
    assert progress.loss == 2.5 and "step 3" in (said := capsys.readouterr().err)
    assert "loss 2.5" in said and asked == [()]
    progress.see(loss=torch.tensor(0.5))
    progress.pass_boundary(4, 0.0)
    assert progress.loss == 0.5 and "loss 0.5" in capsys.readouterr().err
