"""What a rank gives to one who heals: a copy of one boundary, made beside the next inner step."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsx.outer import donor as donor_module
from dsx.outer.donor import DATA, FIRST, GONE, WAIT, Donor
from dsx.outer.parcel import Opened, Parcel
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, TinyNet, mean_loss

STEP = 4  # H: anchors move at the boundary behind which the copy is made, and at the next ones


def new_run() -> Simulated:
    return Simulated(
        TinyNet(), lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        ALL_CASES["streaming_diloco"].method(2), 2,
    )  # fmt: skip


def ask(donor: Donor, *words: Any) -> bytes:
    answers: list[bytes] = []
    donor.serve((1, 0), FIRST + json.dumps(words).encode(), answers.append)
    return answers[0]


def test_a_copy_is_of_its_boundary_however_late_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = new_run()
    loop = run.loops[0]
    donor, copy_shared = Donor(loop), donor_module.copy_shared
    release = threading.Event()

    def late(*args: Any, **kwargs: Any) -> Callable[[], Parcel]:
        copy = copy_shared(*args, **kwargs)
        assert copy is not None

        def slow() -> Parcel:
            assert release.wait(60)
            return copy()

        return slow

    monkeypatch.setattr(donor_module, "copy_shared", late)
    assert ask(donor, "begin", "x", STEP, 7) == DATA
    for _ in range(STEP):
        run.train_step(mean_loss)
    assert ask(donor, "head", "x") == WAIT  # training goes on meanwhile
    expected = [anchor.clone() for anchor in loop.state.anchor]
    threading.Timer(0.3, release.set).start()  # the next boundary waits for it
    for _ in range(8):
        run.train_step(mean_loss)
    assert not all(map(torch.equal, expected, loop.state.anchor))
    answer = ask(donor, "head", "x")
    assert answer[:1] == DATA
    opened = Opened(answer[1:])
    for index in range(len(opened.hashes)):
        assert opened.put(index, ask(donor, "slice", "x", index)[1:])
    assert opened.values["history"]["step"] == STEP
    for fragment, anchor in enumerate(expected):
        assert torch.equal(opened.tensors[f"shared.0/{fragment}"], anchor)


def test_a_copy_that_finds_no_memory_is_gone_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run()
    donor = Donor(run.loops[0])

    def fail() -> Parcel:
        raise MemoryError("none left")

    monkeypatch.setattr(donor_module, "copy_shared", lambda *a, **k: fail)  # pyright: ignore
    ask(donor, "begin", "x", 2, 7)
    for _ in range(4):
        run.train_step(mean_loss)
    assert ask(donor, "head", "x")[:1] == GONE
    assert "what a cluster that heals needs is not copied: none left" in caplog.text
