"""What a cluster hands out of its run's folder, to whom, and how much of it."""

from __future__ import annotations

import base64
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from dsx.telemetry.served_files import (
    MOST_BYTES,
    ByteBudget,
    Listing,
    ServedFiles,
    checksum,
    served_names,
    unpack,
)
from tests.telemetry.watch.folders import append, make_run, step_record

MEMBERS = [("berlin", "127.0.0.1:29400"), ("oslo", None)]


class Clock:
    """Seconds that a test lets pass."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def served(folder: Path | None, cluster: int = 0, line: float | None = None) -> ServedFiles:
    budget = ByteBudget(lambda: line, Clock())
    return ServedFiles(cluster, lambda: folder, MEMBERS, budget)


def read(files: ServedFiles, name: str, **asked: Any) -> dict[str, Any]:
    return files.answer({"verb": "records", "file": name, **asked})


def crc_at(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        return checksum(file.fileno(), offset)


def test_what_there_is_and_who_the_members_are(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "keys.secret").write_text("no")
    (run / "summary.json").write_text("{}")
    told = served(run, 1).answer({"verb": "records"})
    assert {*told["files"]} == {"run.cluster_1.json", "metrics.cluster_1.jsonl"}
    assert {*served(run).answer({})["files"]} == {"run.json", "metrics.jsonl", "summary.json"}
    listing = Listing(json.loads(json.dumps(told)), 1)
    assert listing.members == MEMBERS
    size, stamp = listing.sizes["metrics.cluster_1.jsonl"]
    assert size == (run / "metrics.cluster_1.jsonl").stat().st_size
    append(run, 1, step_record(1, 41))
    after = Listing(served(run, 1).answer({}), 1).sizes["metrics.cluster_1.jsonl"]
    assert after[0] > size and after[1] != stamp
    with pytest.raises(ValueError, match="another cluster"):
        Listing(told, 0)


def test_a_file_comes_in_pieces_and_goes_on_where_it_grows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    path, files = run / "metrics.jsonl", served(run)
    found = b""
    while True:
        piece = read(files, "metrics.jsonl", offset=len(found), most=1000,
                     before=crc_at(path, len(found)))  # fmt: skip
        assert piece["offset"] == len(found) and not piece["is_anew"]
        data = unpack(piece["data"])
        assert len(data) <= 1000
        found += data
        if len(found) == piece["size"]:
            break
    assert found == path.read_bytes()
    append(run, 0, step_record(0, 41))
    piece = read(files, "metrics.jsonl", offset=len(found), before=zlib.crc32(found[-1024:]))
    assert found + unpack(piece["data"]) == path.read_bytes()


def test_a_file_that_was_written_anew_begins_anew(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    path = run / "metrics.jsonl"
    before, size = crc_at(path, 2000), path.stat().st_size
    path.write_bytes(path.read_bytes().replace(b"1000", b"2000"))
    assert path.stat().st_size == size
    piece = read(served(run), "metrics.jsonl", offset=2000, before=before)
    assert piece["is_anew"] and piece["offset"] == 0
    assert unpack(piece["data"])[:100] == path.read_bytes()[:100]
    path.write_text("short\n")
    piece = read(served(run), "metrics.jsonl", offset=2000, before=before)
    assert piece["is_anew"] and unpack(piece["data"]) == b"short\n"


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/passwd", "metrics.cluster_1.jsonl", "run.json/../../secret", "", ".",
     "run.json\0", "trace.cluster_0.rank_0.part_1.jsonl.gz", ["run.json"], 7, "x" * 100_000],
)  # fmt: skip
def test_no_other_file_is_handed_out(name: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(ValueError, match="is not handed out; these are: run.json, metrics.jsonl"):
        read(served(run), name)


def test_a_link_or_a_pipe_in_a_files_place_is_not_followed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "secret").write_text("secret")
    (run / "log.txt").symlink_to(tmp_path / "secret")
    os.mkfifo(run / "summary.json")
    files = served(run)
    assert {*files.answer({})["files"]} == {"run.json", "metrics.jsonl"}
    with pytest.raises(ValueError, match="log.txt cannot be read there"):
        read(files, "log.txt")
    with pytest.raises(ValueError, match="summary.json is no plain file"):
        read(files, "summary.json")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"offset": -1}, "offset=-1 must be from 0"),
        ({"offset": 1 << 80}, "offset=1208925819614629174706176 must be"),
        ({"offset": True}, "offset=True must be"),
        ({"offset": 1.5}, "offset=1.5 must be"),
        ({"most": MOST_BYTES + 1}, f"most={MOST_BYTES + 1} must be from 1 to {MOST_BYTES}"),
        ({"most": 0}, "most=0 must be"),
        ({"before": "x"}, "before='?x'? must be"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(
    asked: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        read(served(make_run(tmp_path / "run")), "run.json", **asked)


def test_an_offset_beyond_the_end_is_of_another_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    piece = read(served(run), "run.json", offset=1 << 62, before=1)
    assert piece["is_anew"] and unpack(piece["data"]) == (run / "run.json").read_bytes()


def test_what_does_not_pack_goes_in_smaller_pieces(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "summary.json").write_bytes(os.urandom(MOST_BYTES))
    piece = read(served(run), "summary.json")
    assert 0 < len(unpack(piece["data"])) < MOST_BYTES and len(piece["data"]) < 1 << 16


def test_all_askers_together_get_a_small_share_of_the_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "summary.json").write_bytes(os.urandom(MOST_BYTES))
    clock, line = Clock(), 1e6
    files = ServedFiles(0, lambda: run, MEMBERS, ByteBudget(lambda: line, clock))
    sent = 0
    while clock.now < 20:
        answer = read(files, "summary.json")
        sent += len(json.dumps(answer))
        if "wait_seconds" in answer:
            assert "data" not in answer and answer["wait_seconds"] > 0
            clock.now += max(answer["wait_seconds"], 0.01)
    assert 0.015 * line * 20 < sent < 0.03 * line * 20
    assert ByteBudget(lambda: None).bytes_per_second == 128 << 10
    assert ByteBudget(lambda: 1e9).bytes_per_second == 128 << 10
    assert ByteBudget(lambda: 1.0).bytes_per_second == 4 << 10


def test_a_run_that_keeps_no_records_says_how(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keeps no records.*metrics.dir is not set; set it"):
        served(None).answer({})
    assert served(tmp_path / "to come").answer({})["files"] == {}
    assert read(served(tmp_path / "to come"), "run.json") == {"is_missing": True}


def test_an_answer_is_read_with_suspicion() -> None:
    bomb = base64.b64encode(zlib.compress(bytes(MOST_BYTES + 1))).decode()
    for data in (bomb, "!", base64.b64encode(b"no").decode(), bomb[:40]):
        with pytest.raises(ValueError):
            unpack(data)
    for members in ([["a"]], [[1, None]], [["a", 2]], ["ab"]):
        with pytest.raises(ValueError, match="members"):
            Listing({"cluster": 0, "members": members, "files": {}}, 0)
    odd = {"run.json": {"size": -1, "stamp": ""}}
    with pytest.raises(ValueError, match="run.json cannot be read"):
        Listing({"cluster": 0, "members": [], "files": odd}, 0)
    assert "summary.json" not in served_names(1)
