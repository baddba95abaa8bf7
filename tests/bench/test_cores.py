"""`dsx bench cores`: one cluster's coding by itself is what it is between two."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dsx.bench.cores.bench import CODECS, open_channel
from dsx.bench.cores.peer import record, replay
from dsx.cli import app
from dsx.compress.base import Launch
from dsx.config.schema import preset
from dsx.core.membership import Seat
from dsx.outer.channel import FragmentChannel
from tests.compress.channels import bits, correlated, fragment_of

FRAGMENT, RANK = fragment_of((64, 40), (70,)), 4
LEAST = {"int4": 32**2, "low_rank": 632**2}  # of factors of rank 128 that save what they have to


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "cores", *arguments])


@pytest.mark.parametrize("name", CODECS)
def test_a_replayed_cluster_gives_the_bits_that_the_other_one_gave(name: str) -> None:
    block = {**CODECS[name], **({"rank": RANK} if name == "low_rank" else {})}
    compression = preset("diloco", 2, compression=block).compression
    channels = [
        FragmentChannel(compression, FRAGMENT, RANK, Seat.of(m, 2)).codec for m in (0, 1, 0)
    ]
    rank = RANK if name == "low_rank" else None
    for number in (1, 2):  # a cold one, of more messages, and a warm one
        launch, xs = Launch(number, rank), correlated(FRAGMENT.numel, 2)
        both, alone = [x.clone() for x in xs], xs[0].clone()
        messages = record(channels[0], channels[1], both, launch)
        assert torch.equal(bits(both[0]), bits(both[1])) and not torch.equal(both[0], xs[0])
        replay(channels[2], alone, launch, messages, nullcontext)
        assert torch.equal(bits(alone), bits(both[0]))
        for channel, x in zip(channels, (*xs, xs[0]), strict=True):
            if channel.settled:
                channel.settle(x.clone(), launch)
    slots = zip(channels[0].slots.items(), channels[2].slots.items(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in slots)


@pytest.mark.parametrize("name", LEAST)
@pytest.mark.parametrize("more", [0, 1, 2048**2 + 700 * 2048])
def test_what_is_measured_codes_all_but_a_row(name: str, more: int) -> None:
    """With a residual; in factors, which begin where the round before ended, with low rank."""
    compression = preset("diloco", 2, compression=CODECS[name]).compression
    codec = open_channel(compression, LEAST[name] + more, 128, 0).codec
    residuals = [codec.slots[error].numel() for error in codec.errors]
    assert LEAST[name] + more - 2048 < sum(residuals) <= LEAST[name] + more
    starts = [slot for slot in codec.slots if slot.startswith("q.")]
    assert bool(starts) == (name == "low_rank") and (more < 2 or len(starts) in (0, 2))
    if name == "low_rank":
        assert list(codec.errors) == ["residual.0"]


def test_each_number_of_cores_has_a_row(tmp_path: Path) -> None:
    file, threads = tmp_path / "cores.json", torch.get_num_threads()
    asked = ["--cores", "1", "--numel", str(2 * 632**2), "--fragments", "2", "--json", str(file)]
    result = call(*asked, "--seconds", "0.01", "--repeats", "1", "--codecs", "int4,low_rank")
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())
    assert [(r["compression"], r["cores"], r["at_once"]) for r in rows] == [
        ("int4", 1, 1), ("low_rank", 1, 1),
    ]  # fmt: skip
    assert all(r["launch_seconds"] > 0 and r["training"] > 0 for r in rows)
    assert all(r["training_threads"] >= 1 and r["numel"] == 2 * 632**2 for r in rows)
    assert all(r["core_seconds"] < 60 and 0 < r["had"] < 1.5 for r in rows)
    busy = "the host was busy" in result.output
    assert busy == (min(r["had"] for r in rows) < 0.9)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cores", "100000"], "must be numbers of 1 to"),
        (["--cores", "one"], "must be numbers of 1 to"),
        (
            ["--numel", "798847", "--fragments", "2"],
            "low_rank codes nothing in 399423 elements; give each fragment 399424 or more",
        ),
        (
            ["--codecs", "int4", "--numel", "4096", "--fragments", "5"],
            "--numel 4096 in --fragments 5: int4 codes nothing in 819 elements; give each",
        ),
        (["--codecs", "int4,zip"], "--codecs has 'zip'; it takes int8, int4, 2bit, low_rank"),
    ],
)
def test_mistakes_end_with_one_line(arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1
