"""A file is read as it grows, whatever its writer does."""

from __future__ import annotations

from pathlib import Path

from dsx.telemetry.watch.follow import FollowedFile


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_lines_come_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = FollowedFile(path)
    assert file.read().lines == []
    append(path, "one\ntw")
    first = file.read()
    assert first.lines == [b"one"]
    assert first.is_anew
    assert file.read().lines == []
    append(path, "o\nthree\n")
    second = file.read()
    assert second.lines == [b"two", b"three"]
    assert not second.is_anew
    assert file.read_bytes == file.size_bytes == len("one\ntwo\nthree\n")


def test_a_file_in_the_place_of_another_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = FollowedFile(path)
    append(path, "one\ntwo\n")
    file.read()
    append(tmp_path / "new", "one\nzwei\ndrei\n")
    (tmp_path / "new").replace(path)
    fresh = file.read()
    assert fresh.is_anew
    assert fresh.lines == [b"one", b"zwei", b"drei"]


def test_a_file_that_was_cut_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = FollowedFile(path)
    append(path, "one\ntwo\n")
    file.read()
    path.write_text("one\n")
    assert file.read() == file.read().__class__([b"one"], is_anew=True)


def test_a_line_longer_than_a_chunk(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = FollowedFile(path)
    append(path, "a" * (3 << 20) + "\nb\n")
    assert [len(line) for line in file.read().lines] == [3 << 20, 1]


def test_a_long_file_in_chunks_or_from_near_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    lines = [f"{number:07d}" for number in range(400_000)]
    path.write_text("\n".join(lines) + "\n")
    file, found = FollowedFile(path), []
    while fresh := file.read().lines:
        found += fresh
    assert [line.decode() for line in found] == lines
    tail = FollowedFile(path, most_bytes=804)
    assert len(tail.read().lines) == 101  # the first of them is a part of one
    assert tail.read().lines == []
