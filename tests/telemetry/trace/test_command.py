"""`dsx trace`: what it reads, merges, sums up and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsx.cli import app
from dsx.telemetry.trace import frames
from dsx.telemetry.trace.chrome import ChromeFile
from dsx.telemetry.trace.files import Wanted, select
from dsx.telemetry.trace.parts import Parts, part_path, trace_path
from dsx.telemetry.trace.table import Sums
from tests.telemetry.trace.runs import read_timeline

MS = 1000  # microseconds
START = 1_700_000_000_000_000


def span(name: str, category: str, start: int, end: int, step: int, **facts: Any) -> dict[str, Any]:
    thread = facts.pop("thread", "training")
    start += START
    return {
        "name": name, "category": category, "thread": thread, "start_us": start,
        "duration_us": end + START - start, "step": step, **facts,
    }  # fmt: skip


def rank_spans(ahead: int) -> list[dict[str, Any]]:
    """Two steps of 10 ms: a launch in the first, in the second a wait of 3 ms and an apply."""
    a, of = ahead, {"fragment": 0, "launched": 1}
    thread = {"thread": "dsx-fragment-0", **of}
    sent = {"peers": [1], **thread}
    return [
        span("forward", "forward", a, a + 4 * MS, 1),
        span("backward", "backward", a + 4 * MS, a + 8 * MS, 1),
        span("read", "launch", a + 8 * MS, a + 9 * MS, 1, fragment=0),
        span("launch", "launch", a + 8 * MS, a + 9 * MS + 500, 1, **of),
        span("optimizer step", "optimizer", a + 8 * MS, a + 10 * MS, 1),
        span("handshake", "meet", a + 9 * MS, a + 11 * MS, 1, bytes=48, round=0, **sent),
        span("codes", "network", a + 11 * MS, a + 16 * MS, 1, bytes=400, round=1, **sent),
        span("decode", "decode", a + 16 * MS, a + 17 * MS, 1, **thread),
        span("transfer", "transfer", a + 9 * MS, a + 17 * MS, 1, bytes=448, **thread),
        span("forward", "forward", a + 11 * MS, a + 14 * MS, 2),
        span("wait", "wait", a + 14 * MS, a + 17 * MS, 2, fragment=0),
        span("apply", "apply", a + 14 * MS, a + 18 * MS, 2, bytes=448, **of),
        span("optimizer step", "optimizer", a + 14 * MS, a + 20 * MS, 2),
    ]


def write_text(path: Path, spans: list[dict[str, Any]], session: str = "s") -> None:
    """Write a rank's spans as dsx 0.2 did."""
    records = [{"session": session, "step": 0}, *spans]
    part_path(path, 0).write_text("".join(json.dumps(record) + "\n" for record in records))


def write(path: Path, spans: list[dict[str, Any]], session: str = "s") -> None:
    """Write a rank's spans, a piece for each three."""
    parts = Parts(path, session, 0, 1 << 20)
    noted: list[Any] = []
    for record in spans:
        facts = dict(record)
        name, category, thread, start, duration, step = (
            facts.pop(key)
            for key in ("name", "category", "thread", "start_us", "duration_us", "step")
        )
        noted.append((name, category, thread, start, start + duration, step, facts))
    for at in range(0, len(noted), 3):
        parts.append(noted[at : at + 3])
    parts.close()


@pytest.fixture(params=[write, write_text])
def run_dir(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    for cluster in (0, 1):
        for rank in (0, 1):
            request.param(trace_path(tmp_path, cluster, rank), rank_spans(2 * MS * cluster))
    return tmp_path


def sums_of(folder: Path, wanted: Wanted = Wanted()) -> Sums:  # noqa: B008 - it is frozen
    selection = select(folder, wanted)
    sums = Sums(selection.start, selection.end)
    for rank in selection.ranks:
        for _ in sums.pass_on(rank.rank, selection.spans(rank)):
            pass
    return sums


def dsx(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)], env={"COLUMNS": "100"})


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["traceEvents"]


def test_the_merged_file_is_what_viewers_take(run_dir: Path) -> None:
    assert dsx(run_dir).exit_code == 0
    found = events(run_dir / "trace.json")
    assert {e["ph"] for e in found} == {"M", "X", "s", "t", "f"}
    for event in found:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["name"]
    complete = [e for e in found if e["ph"] == "X"]
    assert len(complete) == 4 * 13
    assert all(e["ts"] >= 0 and e["dur"] >= 0 and e["cat"] for e in complete)
    assert min(e["ts"] for e in complete) == 0
    require_nesting(complete)
    named = {(e["pid"], e["args"]["name"]) for e in found if e["name"] == "process_name"}
    assert named == {
        (1, "cluster 0 rank 0"), (2, "cluster 0 rank 1"),
        (3, "cluster 1 rank 0"), (4, "cluster 1 rank 1"),
    }  # fmt: skip
    tracks = ("training", "fragment 0")
    threads = {(e["tid"], e["args"]["name"]) for e in found if e["name"] == "thread_name"}
    assert threads == {
        (1000 * pid + i, name) for pid in (1, 2, 3, 4) for i, name in enumerate(tracks)
    }
    (codes,) = [e for e in complete if e["name"] == "codes" and e["pid"] == 4]
    assert codes["ts"] == 13 * MS and codes["dur"] == 5 * MS and codes["tid"] == 4001
    assert codes["args"]["bytes"] == 400 and codes["args"]["peers"] == [1]


def test_where_the_folder_is_read_only_the_table_is_shown_all_the_same(run_dir: Path) -> None:
    (run_dir / "trace.json").mkdir()  # cannot be opened to write, whoever tries
    done = dsx(run_dir)
    assert done.exit_code == 0 and "steps 1 to 2: 0.022 s, 4 ranks" in done.stdout
    assert done.stdout.splitlines()[-1] == (
        f"no file: {run_dir / 'trace.json'} cannot be written (Is a directory); --out FILE.json can"
    )
    assert dsx(run_dir, "--out", run_dir / "other.json").exit_code == 0
    assert events(run_dir / "other.json")
    done = dsx(run_dir, "--out", run_dir)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1


def test_a_file_that_cannot_be_completed_does_not_stay(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk(ChromeFile):
        def add(self, spans: Any) -> None:
            super().add(spans)
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("dsx.telemetry.trace.chrome.ChromeFile", FullDisk)
    done = dsx(run_dir)
    assert done.exit_code == 2 and "No space left on device" in done.output
    assert not (run_dir / "trace.json").exists()


def require_nesting(complete: list[dict[str, Any]]) -> None:
    """On a thread a later event begins after an open one's end, or ends within it."""
    stacks: dict[tuple[int, int], list[int]] = {}
    for event in complete:
        stack = stacks.setdefault((event["pid"], event["tid"]), [])
        start, end = event["ts"], event["ts"] + event["dur"]
        while stack and stack[-1] <= start:
            stack.pop()
        assert not stack or end <= stack[-1], event
        stack.append(end)


def test_an_arrow_leads_from_launch_over_transfer_to_apply(run_dir: Path) -> None:
    dsx(run_dir)
    arrows = [e for e in events(run_dir / "trace.json") if e["ph"] in "stf"]
    own = [e for e in arrows if e["pid"] == 1]
    assert [(e["ph"], e["tid"], e["ts"]) for e in own] == [
        ("s", 1000, 8 * MS), ("t", 1001, 9 * MS), ("f", 1000, 14 * MS),
    ]  # fmt: skip
    assert len({e["id"] for e in own}) == 1 and isinstance(own[0]["id"], int)
    assert len({e["id"] for e in arrows}) == 4


def test_times_are_of_the_innermost_span(run_dir: Path) -> None:
    own = {
        category: round(1e6 * spent) for category, spent in sums_of(run_dir).seconds[0, 0].items()
    }
    assert own == {
        "forward": 7 * MS, "backward": 4 * MS, "launch": 1500, "wait": 3 * MS, "apply": MS,
        "optimizer": 500 + 2 * MS, "other": 22 * MS - 19 * MS,
        "transfer": 0, "meet": 2 * MS, "network": 5 * MS, "decode": MS,
    }  # fmt: skip


def test_the_table_names_ranks_and_shares(run_dir: Path) -> None:
    shown = dsx(run_dir).output
    assert "steps 1 to 2: 0.022 s, 4 ranks" in shown
    assert "cluster 1's clock is 2.0 ms ahead of cluster 0's" in shown
    (forward,) = [line for line in shown.splitlines() if " forward " in line]
    assert [cell.strip() for cell in forward.split("│")[1:-1]] == [
        "forward", "0.007", "0.007", "0.007", "0.007", "31.8 %",
    ]  # fmt: skip


def test_of_many_ranks_it_shows_the_spread(run_dir: Path) -> None:
    for rank in range(2, 6):
        write(trace_path(run_dir, 1, rank), rank_spans(0)[:1])
    shown = dsx(run_dir).output
    (backward,) = [line for line in shown.splitlines() if " backward " in line]
    assert [cell.strip() for cell in backward.split("│")[1:4]] == ["backward", "0.000", "0.002"]
    assert "least" in shown and "cluster 0" not in shown.splitlines()[4]


@pytest.mark.parametrize("wanted", [Wanted((2, 2)), Wanted(last=1)])
def test_steps_cut_the_time(run_dir: Path, wanted: Wanted) -> None:
    timeline = read_timeline(run_dir, wanted)
    assert (timeline.start - START, timeline.end - START) == (11 * MS, 22 * MS)
    names = [s.name for s in timeline.spans if s.rank == (0, 0)]
    assert names == ["transfer", "codes", "forward", "optimizer step", "apply", "wait", "decode"]
    assert sums_of(run_dir, wanted).seconds[0, 0]["network"] == 5 * MS / 1e6
    choice = ["--last", "1"] if wanted.last else ["--steps", "2"]
    shown = dsx(run_dir, *choice, "--out", run_dir / "two.json").output
    assert "steps 2 to 2: 0.011 s" in shown and (run_dir / "two.json").exists()


def test_more_last_steps_than_there_are_is_all(run_dir: Path) -> None:
    assert "steps 1 to 2: 0.022 s, 4 ranks" in dsx(run_dir, "--last", "50").output


@pytest.mark.parametrize(("ranks", "shown"), [("1", [1]), ("0-1", [0, 1]), ("1, 0,1", [0, 1])])
def test_ranks_are_those_of_each_cluster(run_dir: Path, ranks: str, shown: list[int]) -> None:
    done = dsx(run_dir, "--ranks", ranks)
    assert done.exit_code == 0
    named = [
        e["args"]["name"] for e in events(run_dir / "trace.json") if e["name"] == "process_name"
    ]
    assert named == [f"cluster {m} rank {r}" for m in (0, 1) for r in shown]


def test_what_is_not_asked_for_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other ranks nothing is, of other steps no piece is unpacked."""
    for rank in range(4):
        path = trace_path(tmp_path, 0, rank)
        parts = Parts(path, "s", 0, 1 << 20)
        for step in range(1, 101):
            begin = START + step * 10 * MS
            parts.append([("forward", "forward", "training", begin, begin + 9 * MS, step, {})])
        parts.close()
    unpacked, opened = list[int](), set[str]()
    as_before, heads = frames._unpack, frames.heads_of
    monkeypatch.setattr(frames, "_unpack", lambda p: unpacked.append(len(p)) or as_before(p))
    monkeypatch.setattr(
        "dsx.telemetry.trace.files.heads_of", lambda path: opened.add(path.name) or heads(path)
    )
    done = dsx(tmp_path, "--last", "3", "--ranks", "0,2")
    assert "steps 98 to 100: 0.029 s, 2 ranks" in done.output
    assert opened == {f"trace.cluster_0.rank_{rank}.part_1.jsonl.gz" for rank in (0, 2)}
    assert len(unpacked) == 2 * (1 + 3 + 3)  # whose it is, when those steps were, and they


def test_more_spans_than_a_viewer_opens_are_a_table_alone(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsx.telemetry.trace.command.MOST_SPANS", 30)
    done = dsx(run_dir)
    assert done.exit_code == 0 and "steps 1 to 2: 0.022 s, 4 ranks" in done.output
    said = "52 spans are more than a viewer opens (30); choose with --last, --steps or --ranks"
    assert f"no file: {said}" in done.output and not (run_dir / "trace.json").exists()
    done = dsx(run_dir, "--out", run_dir / "x.json")
    assert done.exit_code == 2 and said in done.output and not (run_dir / "x.json").exists()
    assert dsx(run_dir, "--ranks", "0", "--out", run_dir / "x.json").exit_code == 0


def test_the_picture_is_a_png(run_dir: Path) -> None:
    picture = run_dir / "trace.png"
    assert dsx(run_dir, "--picture", picture).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_clocks_are_compared_by_what_ends_together(run_dir: Path) -> None:
    assert sums_of(run_dir).clocks.offsets() == {1: 2e-3}


def test_lines_that_are_none_are_counted(tmp_path: Path) -> None:
    write_text(trace_path(tmp_path, 0, 1), rank_spans(0))
    with part_path(trace_path(tmp_path, 0, 1), 0).open("a") as file:
        file.write('{"name": "forward"}\n[1]\n{"name": "for')
    shown = dsx(tmp_path)
    assert shown.exit_code == 0 and "skipped 3 spans or lines that are damaged" in shown.output


def test_what_is_damaged_is_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    path = trace_path(tmp_path, 0, 1)
    write(path, rank_spans(0))
    own = part_path(path, 1)
    heads = list(frames.heads_of(own))
    content = bytearray(own.read_bytes())
    content[heads[1].offset + 80] ^= 0x55
    own.write_bytes(bytes(content) + bytes(content[:70]))  # and cut off at the end
    shown = dsx(tmp_path)
    assert shown.exit_code == 0 and "skipped 4 spans or lines that are damaged" in shown.output
    assert len(read_timeline(tmp_path).spans) == 10


def test_files_of_another_run_are_left_out(run_dir: Path) -> None:
    write(trace_path(run_dir, 0, 7), rank_spans(-60_000 * MS), session="older")
    shown = dsx(run_dir)
    assert "left out 1 files of another run" in shown.output and "4 ranks" in shown.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "9-12"], "--steps 9-12: the trace holds steps 1 to 2; choose among those"),
        (["--steps", "x"], "--steps 'x' must be the first and the last step; try 40-60"),
        (["--steps", "4-2"], "--steps '4-2' must be the first and the last step"),
        (["--steps", "1", "--last", "2"], "--steps 1 and --last 2 are two choices; leave one out"),
        (["--last", "0"], "Invalid value for '--last'"),
        (["--ranks", "2-3"], "--ranks 2-3: the trace has 0-1; choose among those"),
        (["--ranks", "0,2,4-5"], "--ranks 2,4-5: the trace has 0-1; choose among those"),
        (["--ranks", "3-2"], "--ranks '3-2' must be numbers of ranks, or from-to"),
        (["--ranks", "0,"], "--ranks '0,' must be numbers of ranks, or from-to, with commas"),
        (["--ranks", "0-9999999"], "--ranks '0-9999999' must be numbers of ranks"),
        (["--out", "/nowhere/x.json"], "No such file or directory: '/nowhere/x.json'"),
        (["--picture", "x.nope"], "Format 'nope' is not supported"),
    ],
)
def test_mistakes_are_named(run_dir: Path, arguments: list[str], said: str) -> None:
    result = dsx(run_dir, *arguments)
    assert result.exit_code == 2 and said in result.output


def test_a_directory_without_a_trace_says_what_to_set(tmp_path: Path) -> None:
    result = dsx(tmp_path)
    assert result.exit_code == 2 and "train with dsx.metrics.dir set to it" in result.output
    (tmp_path / "metrics.jsonl").touch()
    result = dsx(tmp_path)
    assert result.exit_code == 2
    assert 'holds no trace: add "trace": true beside "dir"' in result.output
    result = dsx(tmp_path / "none")
    assert result.exit_code == 2 and f"no run directory at {tmp_path / 'none'}" in result.output


def test_a_run_that_an_earlier_version_began_goes_on_behind_its_lines(tmp_path: Path) -> None:
    path = trace_path(tmp_path, 0, 0)
    write_text(path, rank_spans(0), "before")
    parts = Parts(path, "now", 1, 1 << 20)
    at = START + 40 * MS
    parts.append([("forward", "forward", "training", at, at + MS, 2, {})])
    parts.close()
    found = [(s.name, s.step) for s in read_timeline(tmp_path).spans]
    assert found.count(("optimizer step", 1)) == 1 and ("transfer", 1) in found
    assert [name for name, step in found if step == 2] == ["forward"]


@pytest.mark.parametrize(
    ("old", "new"), [("announce", "handshake"), ("judge", "check"), ("notes", "sideband")]
)
def test_a_trace_of_an_earlier_version_shows_today_s_names(
    tmp_path: Path, old: str, new: str
) -> None:
    write_text(trace_path(tmp_path, 0, 0), [span(old, "decode", 0, MS, 1)])
    assert [s.name for s in read_timeline(tmp_path).spans] == [new]


def test_a_trace_of_the_run_that_was_in_the_folder_before_is_not_this_run_s(run_dir: Path) -> None:
    starts = [
        {"session": name, "time": f"2026-01-0{i}T00:00:00Z"} for i, name in enumerate("sx", 1)
    ]
    about = run_dir / "run.json"
    about.write_text(json.dumps({"format": 1, "starts": starts, "checkpoints": []}))
    assert len(read_timeline(run_dir).ranks) == 4, "of a start of the same run, which goes on"
    about.write_text(json.dumps({"format": 1, "starts": starts[1:], "checkpoints": []}))
    result = dsx(run_dir)
    assert result.exit_code == 2
    assert "holds no trace of this run (4 files are of another)" in result.output
