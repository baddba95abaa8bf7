"""One rank's trace on the disk: parts that follow one another, of which the oldest go.

    trace.cluster_0.rank_3.part_1.jsonl.gz, trace.cluster_0.rank_3.part_2.jsonl.gz, ...

A part is full at an eighth of what the rank may take; a whole piece is in it or none (frames.py).
A resumed run goes on behind what is there, without the steps that it takes again.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from dsx.telemetry.appending import FLAGS, append_whole, is_open_at
from dsx.telemetry.jsonl import drop_beyond
from dsx.telemetry.trace.batch import Noted, Span, from_line, session_in, to_line
from dsx.telemetry.trace.frames import Head, end_of, heads_of, lines_of, pack

logger = logging.getLogger(__name__)
_PARTS = 8
_NAME = re.compile(r"trace\.cluster_(\d+)\.rank_(\d+)(?:\.part_(\d+)\.jsonl\.gz|\.jsonl)")


def trace_path(directory: Path, cluster_id: int, rank: int) -> Path:
    """Return the name of one rank's trace, which its parts have a number in."""
    return directory / f"trace.cluster_{cluster_id}.rank_{rank}.jsonl.gz"


def part_path(path: Path, number: int) -> Path:
    """Return a part of the trace that `trace_path` names; part 0 is what dsx 0.2 wrote as text."""
    stem = path.name.removesuffix(".jsonl.gz")
    return path.with_name(f"{stem}.part_{number}.jsonl.gz" if number else f"{stem}.jsonl")


def place_of(path: Path) -> tuple[int, int, int] | None:
    """Return the cluster, rank and part of a file's name, None if it is of no trace."""
    found = _NAME.fullmatch(path.name)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


def parts_of(folder: Path) -> dict[tuple[int, int], list[Path]]:
    """Return the files of each cluster's ranks, the oldest first."""
    found = sorted((place, path) for path in folder.iterdir() if (place := place_of(path)))
    parts: dict[tuple[int, int], list[Path]] = {}
    for (cluster, rank, _), path in found:
        parts.setdefault((cluster, rank), []).append(path)
    return parts


class Parts:
    """Appends to one rank's trace, behind the steps up to `step`; None: behind all.

    Nothing is opened or made before the first spans. Used by one thread at a time.
    """

    def __init__(self, path: Path, session: str, step: int | None, most_bytes: int) -> None:
        self.path = path
        self._session, self._step = session, step
        self._most_bytes = most_bytes
        self._number = 1
        self._descriptor: int | None = None
        self._is_begun = False

    def append(self, spans: Sequence[Noted], dropped: int = 0) -> None:
        """Write spans as a piece, its times in microseconds; OSError: it is not there."""
        descriptor = self._open()
        if os.fstat(descriptor).st_size >= self._most_bytes // _PARTS:
            self.close()
            self._number += 1
            self._make_room()
            descriptor = self._open()
        append_whole(descriptor, pack(*to_line(self._session, spans, dropped)))

    def close(self) -> None:
        """Close; a later `append` opens it again, behind what it holds."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _open(self) -> int:
        own = part_path(self.path, self._number)
        if self._descriptor is not None and is_open_at(own, self._descriptor):
            return self._descriptor
        self.close()
        if self._is_begun:  # the folder is not made again: it may be where a disk was
            self._descriptor = os.open(own, FLAGS, 0o666)
            return self._descriptor
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = self._drop()
        self._descriptor = os.open(part_path(self.path, self._number), FLAGS, 0o666)
        self._is_begun = True
        if kept:
            self.append(kept)
        return self._descriptor

    def _drop(self) -> list[Noted]:
        """Take away what is behind the step, and what is cut off; return what is of earlier steps
        in pieces that have both.
        """
        kept: list[Noted] = []
        for path in self._found():
            place = place_of(path)
            assert place is not None
            if not place[2]:
                if self._step is not None:
                    drop_beyond(path, self._step)
                continue
            heads = list(heads_of(path))
            end = end_of(heads[-1] if heads else None)
            if end < path.stat().st_size:
                logger.warning("dropping incomplete spans from %s", path)
            beyond = [h for h in heads if self._step is not None and h.last > self._step]
            if beyond:
                end = beyond[0].offset
                dropped = [head for head in heads if head.offset >= end]
                kept += _up_to(self._step or 0, path, dropped)
            if not end:
                path.unlink()
            elif end < path.stat().st_size:
                os.truncate(path, end)
            self._number = place[2] if end else self._number
        return kept

    def _found(self) -> list[Path]:
        place = place_of(part_path(self.path, 1))
        assert place is not None
        return parts_of(self.path.parent).get(place[:2], [])

    def _make_room(self) -> None:
        """Remove the oldest parts, so that one more finds room."""
        paths = self._found()
        sizes = [path.stat().st_size for path in paths]
        room = self._most_bytes * (_PARTS - 1) // _PARTS
        while paths and sum(sizes) > room:
            paths.pop(0).unlink()
            sizes.pop(0)


def last_lines(path: Path, most_bytes: int) -> bytes:
    """Return the newest lines of a part, so many bytes at most."""
    lines: list[bytes] = []
    for head in reversed(list(heads_of(path))):
        ((_, line),) = lines_of(path, [head])
        most_bytes -= len(line or b"")
        if most_bytes < 0:
            break
        lines.append(line or b"")
    return b"".join(reversed(lines))


def last_session(path: Path, heads: Iterable[Head]) -> str | None:
    """Return whose the newest of some pieces is that can be read; None without one."""
    for head in reversed([*heads]):
        ((_, line),) = lines_of(path, [head])
        if line is not None:
            return session_in(line)
    return None


def _up_to(step: int, path: Path, heads: list[Head]) -> list[Noted]:
    """Return the spans of steps up to one that pieces have among others."""
    mixed = [head for head in heads if head.first <= step]
    lines = [line for _, line in lines_of(path, mixed) if line is not None]
    spans: list[Span] = [span for line in lines for span in from_line(line, 0, 0)]
    return [
        (s.name, s.category, s.track[2], s.start, s.end, s.step, s.facts)
        for s in spans
        if s.step <= step
    ]
