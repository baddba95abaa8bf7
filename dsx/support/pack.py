"""The parts of a support file: of which file of the run how much, and what is said of it.

Only what dsx itself writes is packed, by its name, and only regular files: a link may lead
anywhere. Of records the first and the last are taken; strings that a script has put into its own
records may be data, and are left out. All is bounded, whatever the run has written.
"""

from __future__ import annotations

import io
import json
import re
import socket
import tarfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from dsx.support.checkpoints import as_text, checkpoints_of
from dsx.support.environment import environment_of
from dsx.support.scrub import Scrubber, hosts_in
from dsx.telemetry.trace.parts import last_lines

_ALL = r"(?:\.cluster_\d+)?"
_RANK = r"trace\.cluster_\d+\.rank_\d+"
_KINDS = {  # most needed first: names, and how many bytes of each file's end
    "run": (re.compile(rf"run{_ALL}\.json"), 8 << 20),
    "stacks": (re.compile(r"stacks\.cluster_\d+\.rank_\d+\.txt"), 256 << 10),
    "log": (re.compile(rf"log{_ALL}\.txt"), 1 << 20),
    "metrics": (re.compile(rf"metrics{_ALL}\.jsonl"), 512 << 10),
    "trace": (re.compile(rf"{_RANK}(?:\.part_\d+\.jsonl\.gz|\.jsonl)"), 128 << 10),
}
_MOST_BYTES = 64 << 20  # of all, before they are compressed
_OWN_RECORDS = ("start", "sync", "finish")  # all of whose strings dsx has written
_TEXT = "<text, left out>"
_HOST_OF_STACKS = re.compile(r"process \d+ on (\S+): ")


@dataclass
class Pack:
    """What goes into the file, by name, with a note on each; and what is left out, with why."""

    parts: dict[str, bytes] = field(default_factory=dict[str, bytes])
    notes: dict[str, str] = field(default_factory=dict[str, str])
    left_out: list[str] = field(default_factory=list[str])
    scrubber: Scrubber = field(default_factory=Scrubber)

    def add(self, name: str, text: str, note: str = "") -> None:
        """Add a part, unless there is too much already."""
        content = text.encode(errors="replace")
        if sum(map(len, self.parts.values())) + len(content) > _MOST_BYTES:
            self.left_out.append(f"{name}: the file would be too large")
            return
        self.parts[name], self.notes[name] = content, note

    def write(self, file: Path, explanation: str) -> None:
        """Write all of it and an explanation as a tar.gz, whole or not at all; never over one."""
        if file.exists():
            raise FileExistsError(f"{file} exists: give another --out")
        unfinished = file.with_name(f".{file.name}.tmp")
        try:
            with tarfile.open(unfinished, "w:gz") as archive:
                for name, content in {"README.txt": explanation.encode(), **self.parts}.items():
                    member = tarfile.TarInfo(f"dsx-support/{name}")
                    member.size, member.mtime = len(content), int(time.time())
                    archive.addfile(member, io.BytesIO(content))
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)


def is_packable(folder: Path) -> bool:
    """Whether a directory has any file that a run writes."""
    return folder.is_dir() and any(_kind_of(path.name) for path in folder.iterdir())


def collect(folder: Path) -> Pack:
    """Return what a run's folder, its checkpoints and this machine say, without keys or data."""
    pack = Pack()
    files = _files_in(folder, pack)
    contents = {file: _read(file, _KINDS[kind][1], pack) for file, kind in files}
    abouts = {file: _parse(contents[file][0]) for file, kind in files if kind == "run"}
    known = [about for about in abouts.values() if about is not None]
    pack.scrubber.know_hosts(_hosts(known, (contents[f][0] for f, k in files if k == "stacks")))
    pack.add("environment.json", as_text(environment_of(folder)), "of this machine, now")
    for file, kind in files:
        text, note = contents[file]
        if kind in ("metrics", "trace"):
            text, dropped = _records(text, pack.scrubber, is_of_scripts=kind == "metrics")
            note += f"; {dropped} lines that are no records" if dropped else ""
        elif abouts.get(file) is not None:
            text = as_text(pack.scrubber.value(abouts[file]))
        else:
            text = pack.scrubber.text(text)
            note += "; no valid JSON, packed as text" if kind == "run" else ""
        pack.add(file.name.removesuffix(".gz"), text, note.removeprefix("; "))
    found = checkpoints_of(folder, known)
    text = as_text(pack.scrubber.value(found))
    pack.add("checkpoints.json", text, f"{len(found)} checkpoints: steps, names of files, sizes")
    return pack


def _kind_of(name: str) -> str | None:
    return next((kind for kind, (names, _) in _KINDS.items() if names.fullmatch(name)), None)


def _files_in(folder: Path, pack: Pack) -> list[tuple[Path, str]]:
    """Return what is to be packed and its kind, in order; what else lies there is counted."""
    files: list[tuple[Path, str]] = []
    others = 0
    for path in sorted(folder.iterdir()):
        kind = _kind_of(path.name)
        if kind is None:
            others += 1
        elif path.is_symlink() or not path.is_file():
            pack.left_out.append(f"{path.name}: no regular file")
        else:
            files.append((path, kind))
    if others:
        pack.left_out.append(f"{others} other files and folders of the run's, unread")
    for kind in ("run", "log", "metrics"):
        if kind not in {k for _, k in files}:
            pack.left_out.append(f"{kind}: the folder has none")
    order = list(_KINDS)
    return sorted(files, key=lambda entry: order.index(entry[1]))


def _read(file: Path, most: int, pack: Pack) -> tuple[str, str]:
    """Return a file's text, and a note where that is its first line and its end."""
    try:
        if file.suffix == ".gz":
            return last_lines(file, most).decode(errors="replace"), "its newest spans, unpacked"
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            if size <= most:
                return stream.read().decode(errors="replace"), ""
            first = stream.readline(most)
            stream.seek(size - most)
            end = stream.read().partition(b"\n")[2]
    except OSError as error:
        pack.left_out.append(f"{file.name}: cannot be read ({error.strerror})")
        return "", "cannot be read"
    return (first + end).decode(errors="replace"), f"its first line, and the end of {size:,} bytes"


def _parse(text: str) -> Mapping[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else None


def _hosts(abouts: Iterable[Mapping[str, Any]], stacks: Iterable[str]) -> set[str]:
    """Return the names of hosts that a run's own files tell, and this host's."""
    found = {host for about in abouts for host in hosts_in(about)}
    return found | {h for text in stacks for h in _HOST_OF_STACKS.findall(text)} | {
        socket.gethostname()
    }  # fmt: skip


def _records(text: str, scrubber: Scrubber, is_of_scripts: bool) -> tuple[str, int]:
    """Return the records of a file without what must not be told; how many lines are none."""
    told: list[str] = []
    lines = text.splitlines()
    for line in lines:
        record = _parse(line)
        if record is not None:
            if is_of_scripts and record.get("kind") not in _OWN_RECORDS:
                kind = {"kind": record["kind"]} if "kind" in record else {}
                record = {**_numbers(record), **kind}
            told.append(json.dumps(scrubber.value(record)) + "\n")
    return "".join(told), len(lines) - len(told)


def _numbers(value: Any) -> Any:
    """Return a JSON value without the strings in it."""
    if isinstance(value, str):
        return _TEXT
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {key: _numbers(inner) for key, inner in items}
    if isinstance(value, list):
        return [_numbers(inner) for inner in cast("list[Any]", value)]
    return value
