"""Whatever is typed behind a command ends it with one message and status 2, or is taken.

What a message says to try is taken then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dsx.cli import app
from dsx.plan.model import from_sizes
from dsx.plan.published.scenario import require_number

NUMBERS = ["0", "-1", "1e30", "nan", "inf", "-inf", "", "x", "10" * 300, "1e-300", "0x10"]
PLAN = [
    "plan", "--params", "7e9", "--layers", "32", "--gpus-per-cluster", "8", "--step-seconds", "2",
    "--clusters", "2", "--gbps", "0.5",
]  # fmt: skip
PLANNED = [
    "--params", "--layers", "--hidden", "--gpus-per-cluster", "--step-seconds", "--mfu", "--gbps",
    "--tokens-per-step", "--latency-ms", "--clusters", "--target", "--memory-limit",
    "--max-interval", "--top",
]  # fmt: skip
NET = [
    "net-test", "--clusters", "2", "--cluster-id", "1", "--rendezvous", "tcp://127.0.0.1:1",
    "--seconds", "0.02", "--deadline-seconds", "1",
]  # fmt: skip
MEASURED = [
    "--clusters", "--cluster-id", "--seconds", "--streams", "--deadline-seconds", "--params",
    "--layers", "--step-seconds", "--target", "--rendezvous", "--interface",
]  # fmt: skip
QUICK = ["quickstart"]
TRAINED = [
    "--steps", "--layers", "--hidden", "--heads", "--sequence-length", "--save-interval", "--seed",
    "--validation-batches", "--log-interval", "--max-minutes", "--dsx-cluster-id",
]  # fmt: skip
BENCH = ["bench", "codec", "--formats", "int4", "--numel", "100", "--repeats", "1"]
FLAGS = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 8 --vocab-size 100"
FIX = re.compile(
    r"\b(try|give|write|leave|use|did you mean|make it first|close|save|start|train)\b"
)


def end(arguments: list[str]) -> tuple[int, str]:
    """Return status and what is said, without the frame; anything but an exit is an error."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "500", "TERM": "dumb"})
    error = result.exception
    assert error is None or isinstance(error, SystemExit), f"{arguments}: {error!r}"
    return result.exit_code, result.stderr


def require_refused(arguments: list[str]) -> str:
    status, said = end(arguments)
    assert status == 2, (arguments, status, said)
    message = said.strip()
    assert message and len(message) < 2500 and "Traceback" not in said
    if message.startswith("dsx "):  # of dsx itself, not of typer, which shows the usage
        assert "\n" not in message, message
    return message


TAKEN = {  # of the numbers, and so not refused
    "--latency-ms": ["0", "1e-300"], "--top": ["10" * 300], "--seed": ["0"], "--cluster-id": ["0"],
    "--max-minutes": ["1e-300"], "--dsx-cluster-id": ["0", "-1", "10" * 300],
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_trained() -> Iterator[None]:
    """What is taken where it should be refused fails the test, and does not replace its process."""

    def refuse(arguments: list[str], environment: dict[str, str]) -> None:
        raise AssertionError(f"would run {arguments}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsx.examples.command._replace_process", refuse)
        yield


ROWS = [(PLAN, o) for o in PLANNED] + [(NET, o) for o in MEASURED] + [(QUICK, o) for o in TRAINED]


@given(st.sampled_from(ROWS), st.sampled_from(NUMBERS))
@settings(derandomize=True, deadline=None, database=None, max_examples=30)
def test_some_numbers_that_cannot_be(row: tuple[list[str], str], value: str) -> None:
    command, option = row
    if value not in TAKEN.get(option, ()):
        require_refused([*command, option, value])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("command", "option"),
    ROWS,
    ids=lambda given: given[0] if isinstance(given, list) else given,
)  # fmt: skip
def test_a_number_that_cannot_be(command: list[str], option: str) -> None:
    for value in NUMBERS:
        if value not in TAKEN.get(option, ()):
            require_refused([*command, option, value])


@pytest.mark.ci
@pytest.mark.parametrize("value", ["0", "10" * 300])
@pytest.mark.parametrize("option", PLANNED)
def test_a_number_that_a_message_advises_is_taken(option: str, value: str) -> None:
    command = [*PLAN, "--max-interval", "5", option]
    for _ in range(3):
        status, said = end([*command, value])
        advised = re.search(rf"{option}=.*; try (?:{option}=)?([\d.e+-]+)$", said.strip())
        if advised is None:
            assert status != 2 or f"{option}=" not in said, said
            return
        value = advised[1]
    raise AssertionError(said)


@given(
    params=st.sampled_from([1, 10, 47, 1e3, 1e6, 7e9]),
    layers=st.sampled_from([1, 2, 32, 10_000]),
    hidden=st.sampled_from([1, 2, 64, 1_000_000]),
)
@settings(derandomize=True, deadline=None, database=None, max_examples=100)
def test_advice_for_a_model_is_taken(params: float, layers: int, hidden: int) -> None:
    """--hidden 0 was advised by one message, and refused by the next."""
    try:
        from_sizes(params, layers, hidden, 8)
    except ValueError as error:
        fewer = re.search(r"; try --layers=(\d+)$", str(error))
        if fewer:
            return test_advice_for_a_model_is_taken.hypothesis.inner_test(
                params, int(fewer[1]), hidden
            )
        advised = re.search(r"; try --hidden=(\d+)$", str(error))
        assert advised or "leave --hidden out" in str(error)
        if advised:
            require_number("--hidden", int(advised[1]), 1, 10**6)
        from_sizes(params, layers, int(advised[1]) if advised else None, 8)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return paths of what is no input, by name."""
    base = tmp_path_factory.mktemp("bad")
    contents: dict[str, bytes] = {
        "text": b"hello", "empty": b"", "list.json": b"[]", "binary": bytes(range(256)),
        "quotes.flags": b"--num-layers '", "words.flags": b"--num-layers x --hidden-size",
        "zero.flags": re.sub(r"\d+", "0", FLAGS).encode(),
        "below.flags": FLAGS.replace("8 ", "-8 ").encode(),
        "heads.flags": FLAGS.replace("heads 2", "heads 3").encode(),
        "huge.flags": FLAGS.replace("64", "6" * 400).encode(),
        "wrong.json": b'{"dsx": {"preset": ["diloco"]}, "zero_optimization": [1]}',
        "dots.json": b'{"dsx": {"preset": "diloco", "clusters": {"num_clusters": "2"}}}',
        "figures.json": b'[{"device": "cpu", "format": "int4"}]',
        "link.json": b'{"bits_per_second": -1, "latency_seconds": NaN, "clusters": "2"}',
        "deep.json": b"[" * 100_000, "digits.json": b"9" * 9000,
    }  # fmt: skip
    for name, content in contents.items():
        (base / name).write_bytes(content)
    found = {name: str(base / name) for name in contents}
    odd = {
        "folder": str(base),
        "none": str(base / "none"),
        "long": "x" * 300,
        "below": found["text"],
    }
    return {**found, **odd, "below a file": found["text"] + "/x", "no name": "", "a nul": "a\0b"}


@pytest.mark.ci
@pytest.mark.parametrize(
    "command",
    [
        ["memory", "?"], ["memory", "?", "--model", "?", "--ranks", "2"],
        ["plan", "--clusters", "2", "--gbps", "1", "--step-seconds", "1", "--megatron", "?"],
        ["plan", "--clusters", "2", "--gbps", "1", "--step-seconds", "1", "--from-run", "?"],
        ["plan", "--clusters", "2", "--gbps", "1", "--step-seconds", "1", "--deepspeed", "?",
         "--model", "?", "--gpus-per-cluster", "2"],
        [*PLAN[:-2], "--link", "?"], [*PLAN, "--codec", "?"], [*PLAN, "--gpu", "?"],
        [*BENCH, "--pseudo-gradients", "?"], ["report", "?"], ["trace", "?"],
        ["export", "?", "--out", "exported"],
    ],
    ids=lambda command: " ".join([command[0], *(o for o in command if o.startswith("--"))][-3:]),
)  # fmt: skip
def test_a_file_that_is_none(
    command: list[str], files: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, path in files.items():
        if command[-2:] == ["--codec", "?"] and name == "list.json":
            continue  # no figures: the documented speeds
        require_refused([path if word == "?" else word for word in command])


@pytest.mark.ci
@pytest.mark.parametrize(
    "document",
    [
        {"bits_per_second": "1e9", "latency_seconds": 0}, {"bits_per_second": 1e9},
        {"bits_per_second": 0, "latency_seconds": 0}, {"bits_per_second": True},
        {"bits_per_second": 1e9, "latency_seconds": -1}, [1], "x", None, 5,
        {"bits_per_second": 1e9, "latency_seconds": 0, "clusters": "2"},
    ],
    ids=str,
)  # fmt: skip
def test_a_measured_line_that_is_none(document: Any, tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    path.write_text(json.dumps(document))
    status, said = end([*PLAN[:-2], "--max-interval", "5", "--link", str(path)])
    assert status == 2 or isinstance(document, dict) and document.get("clusters") == "2", said


def test_a_width_that_heads_do_not_divide_is_refused_before_anything_is_made() -> None:
    message = require_refused(["quickstart", "--hidden", "6", "--heads", "4"])
    assert message == (
        "dsx quickstart: --hidden 6 must be a multiple of 2 * --heads = 8 (rotary positions turn "
        "pairs); try --hidden 8"
    )
