"""The worked examples' runs in small: their commands as printed, and what they print."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from dsx.data.command import build
from tests.distributed import the_default_port
from tests.docs.pages import Block, blocks, read
from tests.docs.test_examples import Reader
from tests.installed import needs

PAGES = [f"docs/examples/{name}.md" for name in ("dense", "experts", "long-context")]
RUN = "torchrun --nproc-per-node"
LOSS = re.compile(r"\d+\.\d{3,4}\b")  # of speeds and shares fewer digits are printed
MOST = 0.1  # nats: Python's own library, the data, is another in each release


def in_small(page: str) -> tuple[str, Block]:
    """Return the command of a page's last `sh` block, and the `text` block with what it prints."""
    commands, printed = blocks(page)[-2:]
    (command,) = [c for c in commands.commands if c.startswith(RUN)]
    assert (commands.language, printed.language) == ("sh", "text")
    return command, printed


def told(text: str) -> tuple[list[tuple[str, ...]], list[float]]:
    """Return steps and bytes of a run's lines, and its losses."""
    lines = [line.strip() for line in text.splitlines()]
    steps = [line for line in lines if line.startswith("step ")]
    rows = [line for line in lines if re.match(r"(cluster \d|average) +\d", line)]
    sent = re.compile(r"[\d.]+ [kM]?B\b")
    facts = [(line.split("loss")[0].strip(), *sent.findall(line)) for line in steps]
    facts += [(re.split(r"  +", line)[0], *sent.findall(line)) for line in rows]
    return facts, [float(loss) for line in steps + rows for loss in LOSS.findall(line)]


@pytest.mark.parametrize("page", PAGES)
def test_files_stand_there_as_they_are(page: str) -> None:
    files = [b for b in blocks(page) if b.language == "text" and b.title]
    assert files and all(b.text == read(str(b.title)) for b in files)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_a_run_prints(page: str) -> None:
    facts, losses = told(in_small(page)[1].text)
    assert [name for name, *_ in facts[-3:]] == ["cluster 0", "cluster 1", "average"]
    assert len(losses) == len(facts) + 2  # two of a cluster's: in training, and held out


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "stdlib"
    build(["stdlib"], path)
    return path


@pytest.mark.slow
@needs("megatron.core")
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.timeout(900)
def test_its_run_in_small_prints_that(page: str, data: Path, tmp_path: Path) -> None:
    command, printed = in_small(page)
    reader = Reader(tmp_path, "ci")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "stdlib").symlink_to(data)
    with the_default_port():
        done = subprocess.run(
            ["bash", "-c", command], cwd=reader.folder, env=reader.environment, text=True,
            capture_output=True, timeout=800,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (facts, losses), (seen, reached) = told(printed.text), told(done.stdout)
    assert seen == facts, done.stdout[-3000:]
    pairs = zip(losses, reached, strict=True)
    assert all(abs(a - b) < MOST for a, b in pairs), done.stdout[-3000:]
