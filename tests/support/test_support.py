"""`dsx support`: a run becomes one file, whatever state it is in, without keys or data."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dsx.cli import app
from dsx.support import pack as packing
from dsx.telemetry.trace.parts import Parts, trace_path

SECRETS = [
    "hf_abcdefghijklmnopqrstuvwx", "s3cr3t-of-wandb", "s3cr3t-of-url", "node17", "10.9.8.7",
    "alice", "front.example", "the quick brown fox", "WEIGHTS", "CORPUS", "LINKED", "SUMMARY",
]  # fmt: skip
START = {
    "session": "aa-bb", "time": "2026-01-01T00:00:00Z", "step": 0, "host": "node17.corp.example",
    "pid": 7, "end": None, "versions": {"dsx": "0.3.0", "torch": "2.6.0"},
    "command": ["train.py", "--wandb-key", "s3cr3t-of-wandb", "--lr", "0.1", "--data-path",
                "/home/alice/corpus"],
    "config": {
        "given": {"dsx": {"preset": "diloco"}, "wandb": {"api_key": "s3cr3t-of-wandb"}},
        "resolved": {"clusters": {"rendezvous": "tcp://front.example:29400"}},
    },
}  # fmt: skip


def write_run(folder: Path) -> None:
    """What a run leaves that was killed, with what must not be told wherever it could be."""
    folder.mkdir(parents=True)
    entries = [{"path": "checkpoints/cluster_0/step2", "tag": "step2", "step": 2}]
    about = {"format": 1, "cluster": 0, "starts": [START], "checkpoints": entries}
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "log.txt").write_text(
        "INFO dsx: login hf_abcdefghijklmnopqrstuvwx at https://u:s3cr3t-of-url@front.example/x\n"
        "WARNING dsx: cluster 1 on node17 closed its connection (gloo: [10.9.8.7]:4000)\n"
    )
    (folder / "stacks.cluster_0.rank_0.txt").write_text(
        "2026-01-01T00:00:00Z process 7 on node17.corp.example: has waited 300 s of 600 s for "
        "fragment 3\nthread MainThread\n  /home/alice/train.py:12 in main\n"
    )
    records: list[dict[str, Any]] = [
        {"kind": "start", "step": 0, "preset": "diloco"},
        {"kind": "step", "step": 1, "loss": 2.5, "tokens": 8192, "sample": "the quick brown fox"},
        {"kind": "note", "step": 1, "text": ["the quick brown fox"], "values": [1, 2]},
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines + '{"kind": "step", "st')
    (folder / "trace.cluster_0.rank_0.jsonl").write_text('{"session": "aa-bb"}\n{"name": "x"}\n')
    packed = Parts(trace_path(folder, 0, 1), "aa-bb", 0, 1 << 20)
    packed.append([("forward", "forward", "training", 5, 7, 1, {})])
    packed.append([("backward", "backward", "training", 7, 9, 1, {})])
    packed.close()
    tag = folder / "checkpoints/cluster_0/step2"
    tag.mkdir(parents=True)
    (tag / "dsx.json").write_text(json.dumps({"format": 8, "step": 2, "session": "aa-bb"}))
    (tag / "dsx_rank_00000.safetensors").write_bytes(b"WEIGHTS" * 100)
    unfinished = folder / "checkpoints/cluster_0/step4.unfinished"
    unfinished.mkdir()
    (unfinished / "dsx_rank_00000.safetensors").write_bytes(b"WEIGHTS")
    (folder / "corpus.bin").write_bytes(b"CORPUS")
    (folder / "summary.json").write_text('{"note": "SUMMARY"}')
    (folder.parent / "outside.txt").write_text("LINKED")
    (folder / "log.cluster_1.txt").symlink_to(folder.parent / "outside.txt")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["support", *map(str, arguments)])


def unpack(file: Path) -> dict[str, str]:
    with tarfile.open(file) as archive:
        return {
            member.name.removeprefix("dsx-support/"): archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive
        }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs/a")
    return tmp_path / "runs/a"


def test_a_killed_run_is_packed_without_keys_or_data(run: Path, tmp_path: Path) -> None:
    done = call(run, "--out", tmp_path / "a.tar.gz")
    assert done.exit_code == 0, done.output
    parts = unpack(tmp_path / "a.tar.gz")
    assert set(parts) == {
        "README.txt", "environment.json", "run.json", "stacks.cluster_0.rank_0.txt", "log.txt",
        "metrics.jsonl", "trace.cluster_0.rank_0.jsonl", "checkpoints.json",
        "trace.cluster_0.rank_1.part_1.jsonl",
    }  # fmt: skip
    shown = done.output.replace(str(tmp_path), "")
    for secret in SECRETS:
        for name, text in {**parts, "what was printed": shown}.items():
            assert secret not in text, f"{secret} is in {name}"
    start = json.loads(parts["run.json"])["starts"][0]
    assert start["command"][-1] == "/home/user-1/corpus"
    assert start["versions"] == START["versions"]
    assert start["config"]["given"]["dsx"] == {"preset": "diloco"}
    assert (
        start["host"] in parts["log.txt"] and start["host"] in parts["stacks.cluster_0.rank_0.txt"]
    )
    assert "has waited 300 s of 600 s for fragment 3" in parts["stacks.cluster_0.rank_0.txt"]
    records = [json.loads(line) for line in parts["metrics.jsonl"].splitlines()]
    assert records[1] == {
        "kind": "step", "step": 1, "loss": 2.5, "tokens": 8192, "sample": "<text, left out>",
    }  # fmt: skip
    assert records[2]["values"] == [1, 2] and len(records) == 3
    assert "1 lines that are no records" in done.output
    spans = [json.loads(line) for line in parts["trace.cluster_0.rank_1.part_1.jsonl"].splitlines()]
    assert [one["kinds"][0][0] for one in spans] == ["forward", "backward"]
    saved = {tag["path"]: tag for tag in json.loads(parts["checkpoints.json"])}
    assert set(saved) == {"checkpoints/cluster_0/step2", "checkpoints/cluster_0/step4.unfinished"}
    whole = saved["checkpoints/cluster_0/step2"]
    assert whole["files"]["dsx_rank_00000.safetensors"] == 700
    assert whole["manifest"] == {"format": 8, "step": 2, "session": "aa-bb"}
    assert saved["checkpoints/cluster_0/step4.unfinished"]["is_unfinished"]
    assert "log.cluster_1.txt: no regular file" in done.output
    assert "3 other files and folders" in done.output
    assert parts["README.txt"] in done.output


def test_it_leaves_the_run_as_it_was(run: Path, tmp_path: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    assert call(run, "--out", tmp_path / "a.tar.gz").exit_code == 0
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


def test_the_file_lies_here_by_default(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = run.parent / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert call(run).exit_code == 0
    (file,) = here.iterdir()
    assert file.name.startswith("dsx-support-a-20") and "run.json" in unpack(file)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"starts": 3, "checkpoints": {"a": 1}}'])
def test_a_broken_run_json_is_packed_as_it_is(run: Path, tmp_path: Path, text: str) -> None:
    (run / "run.json").write_text(f'{text}\n"api_key": "s3cr3t-of-wandb"' if text == "{" else text)
    done = call(run, "--out", tmp_path / "a.tar.gz")
    assert done.exit_code == 0, done.output
    parts = unpack(tmp_path / "a.tar.gz")
    assert "run.json" in parts and "s3cr3t" not in parts["run.json"]
    assert ("no valid JSON" in done.output) == (text in ("", "{", "[1]"))
    assert len(json.loads(parts["checkpoints.json"])) == 2  # found without it


@pytest.mark.parametrize("kept", ["run.json", "metrics.jsonl", "stacks.cluster_0.rank_0.txt"])
def test_parts_that_are_not_there_are_named(run: Path, tmp_path: Path, kept: str) -> None:
    for path in run.iterdir():
        if path.name != kept and not path.is_dir():
            path.unlink()
    done = call(run, "--out", tmp_path / "a.tar.gz")
    assert done.exit_code == 0, done.output
    assert set(unpack(tmp_path / "a.tar.gz")) == {
        "README.txt", "environment.json", "checkpoints.json", kept,
    }  # fmt: skip
    assert "log: the folder has none" in done.output


def test_a_long_file_is_packed_from_its_end(run: Path, tmp_path: Path) -> None:
    line = "INFO dsx: " + "x" * 1000
    (run / "log.txt").write_text("".join(f"{number} {line}\n" for number in range(3000)))
    assert call(run, "--out", tmp_path / "a.tar.gz").exit_code == 0
    log = unpack(tmp_path / "a.tar.gz")["log.txt"]
    assert log.startswith("0 INFO") and log.endswith(f"2999 {line}\n")
    assert len(log) < (1 << 20) + 2 * len(line)
    numbers = [int(row.split()[0]) for row in log.splitlines()[1:]]
    assert numbers == [*range(numbers[0], 3000)]  # no half line


def test_what_would_be_too_much_is_left_out(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_MOST_BYTES", 1500)
    done = call(run, "--out", tmp_path / "a.tar.gz")
    assert done.exit_code == 0, done.output
    assert "too large" in done.output
    assert (
        sum(len(t) for n, t in unpack(tmp_path / "a.tar.gz").items() if n != "README.txt") <= 1500
    )


def test_mistakes_are_one_line(run: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken.tar.gz"
    taken.write_text("mine")
    for arguments, message in (
        ([tmp_path / "nowhere"], "no run directory at"),
        ([tmp_path], "holds no metrics*.jsonl and no run.json"),
        ([run, "--out", tmp_path / "a.zip"], "ends in .tar.gz"),
        ([run, "--out", taken], "exists: give another --out"),
        ([run, "--out", tmp_path / "no/a.tar.gz"], "No such file or directory"),
    ):
        done = call(*arguments)
        assert done.exit_code == 2, done.output
        assert message in done.output and "Traceback" not in done.output
        assert done.output.count("\n") == 1
    assert taken.read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
