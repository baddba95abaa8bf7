"""A file is read as it grows, whatever its writer does."""

from __future__ import annotations

from pathlib import Path

from dsx.telemetry.following import FollowedFile, objects_in


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


def test_a_line_that_is_too_long_is_passed_over_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = FollowedFile(path)
    append(path, "z\n" + "a" * (3 << 20))
    assert file.read().lines == [b"z"]
    assert file.read().lines == []  # its end has not come
    assert file.num_too_long == 1
    append(path, "aaa\nb\n" + "c" * (1 << 20) + "\n" + "d" * ((1 << 20) - 1) + "\ne\n")
    found = [line[:1] for _ in range(4) for line in file.read().lines]
    assert found == [b"b", b"d", b"e"]
    assert file.num_too_long == 2
    assert file.read_bytes == path.stat().st_size


def test_a_file_that_grows_faster_than_it_is_read_is_looked_at_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = FollowedFile(path, most_bytes=100, keeps_up=True)
    append(path, '{"a": 1}\n' * 50)
    assert [*objects_in(file.read().lines)] == [{"a": 1}] * 11  # of 9 bytes each
    append(path, '{"b": 2}\n{"c"')
    fresh = file.read()
    assert [*objects_in(fresh.lines)] == [{"b": 2}]
    assert not fresh.is_anew
    append(path, ": 3}\nnot json\n[1]\n" + '{"d": 4}\n' * 50)
    fresh = file.read()
    assert [*objects_in(fresh.lines)] == [{"d": 4}] * 11
    assert not fresh.is_anew


def test_a_long_file_in_chunks_or_from_near_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    lines = [f"{number:07d}" for number in range(400_000)]
    path.write_text("\n".join(lines) + "\n")
    file, found = FollowedFile(path), []
    while fresh := file.read().lines:
        found += fresh
    assert [line.decode() for line in found] == lines
    tail = FollowedFile(path, most_bytes=804)
    assert tail.read().lines == [line.encode() for line in lines[-100:]]
    assert tail.read().lines == []
