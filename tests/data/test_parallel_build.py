"""A build by several processes, or killed and started again, gives the same bits."""

from __future__ import annotations

import fcntl
import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dsx.data import build
from dsx.data.command import app
from dsx.data.dataset import Progress
from dsx.data.documents import Stretch, count_lines, read_rows
from dsx.data.indexed import dtype_for, write_index
from dsx.data.overlap import SKETCH, hash_of, share_in, sketch_of
from dsx.data.progress import Lines
from tests.installed import needs

FILES = ["dataset.json", "train.bin", "train.idx", "validation.bin", "validation.idx"]
KILLED = 77


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Files of all kinds, two of which are larger than the parts of these tests."""
    folder = tmp_path / "sources"
    folder.mkdir()
    rows = [json.dumps({"text": f"row {n} " * (n % 7)}) + "\n" * (1 + n % 3) for n in range(300)]
    (folder / "b.jsonl").write_text("\n" + "".join(rows))
    (folder / "d.jsonl.gz").write_bytes(gzip.compress("".join(rows[:90]).encode()))
    for name, size in (("a.txt", 10), ("c.txt", 9000), ("e.txt", 0), ("f.txt", 300)):
        (folder / name).write_text(name * size)
    (folder / "g.bin").write_bytes(b"\0\xff")
    return folder


def content(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in FILES}


@pytest.mark.parametrize("part_bytes", [200, 4096])
def test_parts_of_any_size_give_the_same(part_bytes: int, sources: Path, tmp_path: Path) -> None:
    whole = build([sources], tmp_path / "whole")
    told: list[Progress] = []
    build([sources], tmp_path / "cut", part_bytes=part_bytes, progress=told.append)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert len({progress.num_done for progress in told}) > 3
    assert whole.skipped.num_not_text == 1 and whole.skipped.num_empty > 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut", "sources", "whole"]


@pytest.mark.ci
def test_any_number_of_processes_gives_the_same(sources: Path, tmp_path: Path) -> None:
    build([sources], tmp_path / "one", part_bytes=700)
    told: list[Progress] = []
    build([sources], tmp_path / "three", part_bytes=700, workers=3, progress=told.append)
    assert content(tmp_path / "three") == content(tmp_path / "one")
    assert told[-1].num_documents == 300 - 43 + 90 - 13 + 3 and told[-1].num_done > 0
    assert not multiprocessing.active_children()


@needs("pyarrow")
@pytest.mark.ci
def test_stretches_of_parquet_and_of_saved_datasets(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import ipc, parquet

    rows = pyarrow.table({"text": [f"row {n} " * (n % 5) for n in range(400)]})
    saved = tmp_path / "saved"
    saved.mkdir()
    parquet.write_table(rows, tmp_path / "a.parquet", row_group_size=37)
    with ipc.new_stream(saved / "data.arrow", rows.schema) as stream:
        stream.write_table(rows, max_chunksize=37)
    (saved / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    for source in (tmp_path / "a.parquet", saved):
        whole, cut = tmp_path / f"{source.name} whole", tmp_path / f"{source.name} cut"
        build([source], whole)
        build([source], cut, part_bytes=source.stat().st_size // 5, workers=2)
        assert content(cut) == content(whole)


@given(
    st.lists(st.sampled_from(["", " ", '{"text": "a"}', '{"text": "long"}']), max_size=12),
    st.booleans(),
    st.lists(st.integers(0, 99), max_size=4),
)
def test_every_line_is_in_one_stretch(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], ends: bool, edges: list[int]
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_text("\n".join(lines) + "\n" * ends)
    starts = [0, *sorted({edge for edge in edges if 0 < edge < path.stat().st_size})]
    stretches = [Stretch(a, b) for a, b in zip(starts, [*starts[1:], None], strict=True)]
    found = [text for stretch in stretches for text in read_rows(path, "text", stretch)]
    assert found == [json.loads(line)["text"] for line in lines if line.strip()]
    counts = [count_lines(path, stretch) for stretch in stretches]
    assert sum(rows for _, rows in counts) == len(found)
    assert sum(number for number, _ in counts) == len(path.read_bytes().splitlines())


def test_a_mistake_in_a_later_stretch_is_told_with_its_line(tmp_path: Path) -> None:
    rows = ['{"text": "a"}\n\n'] * 50
    rows[40] = '{"text": 7}\n'
    (tmp_path / "a.jsonl").write_text("".join(rows))
    with pytest.raises(ValueError, match="line 81 of .* 'text' holds int"):
        build([tmp_path / "a.jsonl"], tmp_path / "out", part_bytes=100)
    (tmp_path / "b.jsonl").write_text('{"text": "good"}\n{"text": "\\ud800"}\n')
    with pytest.raises(ValueError, match="document 2 of .*b.jsonl is no text that UTF-8 can hold"):
        build([tmp_path / "b.jsonl"], tmp_path / "out")


@pytest.mark.parametrize("vocab_size", [65499, 65500])
@pytest.mark.parametrize("lengths", [[], [3], [1, 7, 2]])
@needs("megatron")
@pytest.mark.ci
def test_files_are_those_of_megatron(tmp_path: Path, lengths: list[int], vocab_size: int) -> None:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    theirs = DType.optimal_dtype(vocab_size)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), theirs)
    for length in lengths:
        builder.add_document(np.arange(length), [length])
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert dtype_for(vocab_size) == np.dtype(theirs)
    write_index(tmp_path / "ours.idx", np.array(lengths, np.int32), dtype_for(vocab_size))
    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()


def build_killed_at(operation: int, below: Path, **arguments: Any) -> bool:
    """Build in a fork that ends before its n-th change of a file; return whether it came so far."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    done = 0

    def count(event: str, details: tuple[Any, ...]) -> None:
        nonlocal done
        is_change = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir") or (
            event == "open" and isinstance(details[2], int) and details[2] & os.O_CREAT
        )
        if is_change:
            done += 1
            if done > operation:
                os._exit(KILLED)

    status = 1
    try:
        sys.addaudithook(count)
        build(**arguments)
        status = 0
    finally:
        os._exit(status)


@pytest.mark.ci
@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_killed_before_any_change_of_a_file(
    is_rebuilt: bool, sources: Path, tmp_path: Path
) -> None:
    build([sources], tmp_path / "whole")
    place = tmp_path / "place"
    place.mkdir()
    out, operation, is_killed = place / "out", 0, True
    while is_killed:
        if is_rebuilt:
            build([sources / "c.txt", sources / "f.txt"], out, force=True)
        is_killed = build_killed_at(operation, place, sources=[sources], out=out, part_bytes=6000)
        build([sources], out, part_bytes=6000)
        assert content(out) == content(tmp_path / "whole"), operation
        assert [path.name for path in place.iterdir()] == ["out"], operation
        operation += 1
        if not is_rebuilt:
            for name in FILES:
                (out / name).unlink()
    assert operation > 15


def test_what_is_finished_is_not_encoded_again(sources: Path, tmp_path: Path) -> None:
    build([sources], tmp_path / "whole")
    out = tmp_path / "out"

    def stop(progress: Progress) -> None:
        if progress.num_done > 5000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build([sources], out, part_bytes=2000, progress=stop)
    parts = {path: path.stat().st_mtime_ns for path in (tmp_path / ".out.partial").rglob("*.npz")}
    (sources / "f.txt").write_text("another")  # the parts of other files stay
    told: list[Progress] = []
    build([sources], out, part_bytes=2000, progress=told.append)
    assert len(parts) > 1 and told[0].num_done == told[0].num_kept > 5000
    build([sources], tmp_path / "again")
    assert content(out) == content(tmp_path / "again") != content(tmp_path / "whole")


def test_two_builds_of_one_dataset(sources: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    with (partial / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="is being built by another process"):
            build([sources], tmp_path / "out")
    build([sources], tmp_path / "out")


def is_running(process: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.ci
def test_processes_end_with_the_one_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "text " * 200}) + "\n")
    line = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(line * 70_000)
    command = [sys.executable, "-m", "dsx", "data", "build", "--from", str(tmp_path / "a.jsonl")]
    command += ["--out", str(tmp_path / "out"), "--workers", "2"]
    begun = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    workers: list[int] = []
    while not [*(tmp_path / ".out.partial").rglob("*.tmp")]:  # they are at it
        assert time.monotonic() < deadline and begun.poll() is None
        listed = Path(f"/proc/{begun.pid}/task/{begun.pid}/children").read_text()
        workers = [int(word) for word in listed.split()]
    begun.send_signal(signal.SIGKILL)
    begun.wait()
    assert len(workers) >= 2
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    build([tmp_path / "a.jsonl"], tmp_path / "out", workers=2)
    build([tmp_path / "a.jsonl"], tmp_path / "again")
    assert content(tmp_path / "out") == content(tmp_path / "again")


@pytest.mark.ci
def test_a_process_that_vanishes(sources: Path, tmp_path: Path) -> None:
    def kill(progress: Progress) -> None:
        for process in multiprocessing.active_children()[:1]:
            os.kill(process.pid or 0, signal.SIGKILL)

    with pytest.raises(RuntimeError, match="was ended from outside .out of memory.*--workers"):
        build([sources], tmp_path / "out", part_bytes=50, workers=2, progress=kill)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("sizes", [(0, 100), (SKETCH, 1500)])
@given(st.data())
def test_shares_are_those_of_the_documents(sizes: tuple[int, int], data: st.DataObject) -> None:
    number = st.integers(*sizes)
    both, first, second = (data.draw(number) for _ in range(3))
    texts = [str(number) for number in range(both + first + second)]
    own, other = texts[: both + first], texts[:both] + texts[both + first :]
    sketches = [sketch_of([np.array([hash_of(t) for t in s], np.uint64)]) for s in (own, other)]
    found, exact = share_in(sketches[0], sketches[1]), both / max(len(own), 1)
    if max(len(own), len(other)) < SKETCH:
        assert found == exact
    else:
        assert abs(found - exact) < 0.3  # of some 100 that are compared
    assert share_in(sketches[0], sketches[0]) == (1.0 if own else 0.0)


def test_check_tells_of_damage_and_of_what_is_shared(sources: Path, tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    build([sources], a)
    build([sources], b)
    build([sources / "b.jsonl", sources / "f.txt"], c)
    done = CliRunner().invoke(app, ["check", str(a), str(b), str(c)])
    assert done.exit_code == 0, done.output
    assert f"{a} and {b} are the same, to the bit" in done.stdout
    assert f"{b} and {c}: about" in done.stdout and "100 % the other way round" in done.stdout
    whole = (b / "train.bin").read_bytes()
    (b / "train.bin").write_bytes(whole[:-2] + b"\0\0")
    done = CliRunner().invoke(app, ["check", str(b)])
    assert done.exit_code == 1 and "and not that above; copy it again" in done.stdout
    (b / "train.bin").write_bytes(whole[:-2])
    done = CliRunner().invoke(app, ["check", str(b)])
    assert done.exit_code == 2 and "the file is truncated" in done.stderr


def test_lines_of_progress() -> None:
    said: list[str] = []
    now = [0.0]
    lines = Lines(said.append, lambda: now[0])
    lines(Progress(4000, 1000, 1000, 10, 500, 0))
    now[0] = 40.0
    lines(Progress(4000, 2000, 1000, 30, 4500, 0))
    now[0] = 41.0
    lines(Progress(4000, 3000, 1000, 40, 5500, 0))
    now[0] = 80.0
    lines(Progress(4000, 4000, 1000, 50, 8000, 2000))
    assert said == [
        "goes on: 1 kB of 4 kB of the sources are encoded already",
        "2 kB of 4 kB of the sources, 30 documents, 4,500 tokens, 100 tokens/s",
        "putting it together: 25 % of 8,000 tokens",
    ]
