"""torchft's DiLoCo beside dsx's: skipped without torchft, and the same training with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsx.bench.testbed import UNAVAILABLE
from dsx.data import build

ROOT = Path(__file__).parents[2]
COMMAND = ["-m", "dsx", "bench", "torchft"]


def run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=timeout
    )


def test_without_torchft_it_is_skipped_and_says_what_to_install() -> None:
    without = (
        "import sys; sys.modules['torchft'] = None;"
        "from dsx.cli import app; app(['bench', 'torchft'])"
    )
    done = run(["-c", without], timeout=30)
    assert done.returncode == UNAVAILABLE
    assert "pip install torchft" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        (["--fragments", "2"], "--fragments and --delay go together"),
        (["--interval", "0"], "--interval"),
    ],
)
def test_wrong_options_end_with_2(wrong: list[str], fix: str) -> None:
    done = run([*COMMAND, *wrong], timeout=30)
    assert done.returncode == 2
    assert fix in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)  # three and a half minutes on two idle cores
def test_torchft_and_dsx_end_at_the_same_loss_with_as_much_payload(tmp_path: Path) -> None:
    pytest.importorskip("torchft", exc_type=ImportError)
    pytest.importorskip("megatron.core")  # builds the data
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(40):
        (texts / f"{i}.txt").write_text(f"text {i}: the quick brown fox {i * i} jumps\n" * 40)
    build([texts], tmp_path / "data")
    results = tmp_path / "torchft.json"
    size = "--ratio 4 --rounds 1 --interval 16 --shape 4,32,32,8"
    size += " --fragments 2 --delay 6"
    paths = ["--data", str(tmp_path / "data"), "--out", str(tmp_path), "--json", str(results)]
    done = run([*COMMAND, *size.split(), *paths], timeout=1100)
    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in json.loads(results.read_text())}
    assert list(rows) == [
        "torchft DiLoCo", "dsx diloco", "torchft streaming", "dsx streaming_diloco", "dsx dilocox",
    ]  # fmt: skip
    theirs, ours = rows["torchft DiLoCo"], rows["dsx diloco"]
    assert theirs["validation_loss"] == pytest.approx(ours["validation_loss"], abs=1e-4)
    assert theirs["payload_bytes"] == pytest.approx(ours["payload_bytes"], rel=1e-3)  # headers
    for row in rows.values():
        assert row["payload_bytes"] <= row["wire_bytes"] < 1.6 * row["payload_bytes"]
