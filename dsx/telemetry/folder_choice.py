"""Which folder a start writes to: that of the run it goes on with, or the next free name.

`metrics.dir` names a run's folder. Where it holds another run, a new one gets `<dir>-2`, `<dir>-3`
and so on: a launcher that starts the same command again is not refused, and takes nothing away. A
run that goes on from a checkpoint goes on in the folder of the run that saved it.

Every cluster looks before training, and all of them share what they have found: so they agree,
although each may see a file system of its own.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsx.telemetry.run_folder import (
    cluster_file,
    is_run,
    names_of_starts,
    read_about,
    read_own,
    say_end,
    sessions_of,
)

_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENODEV, errno.ETIMEDOUT}
Found = Mapping[str, Sequence[str] | None]  # by number; None: records of a run without run.json


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run goes on from, and the start (session) that wrote it."""

    path: Path
    session: str


def look(base: Path, cluster: int, joins: str | None = None) -> dict[str, list[str] | None]:
    """Return the names that one cluster's files know their run by, in each folder that is used.

    Empty for a folder with files of other clusters only, but for the run (session) that this
    cluster `joins`, if they are of that one. ValueError for a run.json that is none.
    """
    found: dict[str, list[str] | None] = {}
    pattern = re.compile(rf"{re.escape(base.name)}(-(?P<number>[1-9]\d*))?")
    for path in base.parent.iterdir() if base.parent.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match and match["number"] != "1" and is_run(path):
            about = read_own(path, cluster)
            has_records = cluster_file(path, "metrics", ".jsonl", cluster).exists()
            names = sorted(names_of_starts(about)) if about else None if has_records else []
            if joins is not None and joins in sessions_of(path):
                names = sorted({*(names or ()), joins})
            found[match["number"] or "1"] = names
    return found


class FolderChoice:
    """The folder of one start, the same for all its clusters; None without `metrics.dir`."""

    def __init__(
        self,
        base: Path | None,
        cluster: int,
        session: str,
        found: Sequence[Found],
        joins: bool = False,
    ) -> None:
        """`joins`: the others have begun the run `session`, and write to its folder already."""
        self._joins = joins
        self._base = base
        self._cluster = cluster
        self._found = found
        self._own = session
        self._number = 1
        self._is_claimed = False
        self.continues = False

    @property
    def folder(self) -> Path | None:
        """The folder that has been chosen."""
        if self._base is None or self._number == 1:
            return self._base
        return Path(f"{self._base}-{self._number}")

    def begin(self, origin: Origin | None) -> None:
        """Choose the folder of a start; `continues` says whether it is that of the same run."""
        used = {int(number) for one in self._found for number in one}
        same = [n for n in sorted(used) if origin and self._is_of_run(n, origin.session)]
        if self._joins:
            here = self._found[self._cluster]
            same = [n for n in sorted(used) if self._own in (here.get(str(n)) or ())]
        if self._is_claimed and (not same or origin is None or origin.session == self._own):
            self.continues = True  # this start goes back, in its own folder
            return
        self.continues = bool(same)
        self._number = same[-1] if same else min(set(range(1, len(used) + 2)) - used)
        self._is_claimed = False

    def claim(self, origin: Origin | None, writes: bool) -> str:
        """Make the folder this run's, as the rank that writes there does for its cluster.

        Return what is to be told, if anything. RuntimeError if another run has taken it since the
        choice.
        """
        folder, is_new = self.folder, not self.continues
        self._is_claimed = self.continues = True
        if folder is None or not is_new or not writes:
            return ""
        records = cluster_file(folder, "metrics", ".jsonl", self._cluster)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            records.touch(exist_ok=False)
        except OSError as error:
            if isinstance(error, FileExistsError) and folder.is_dir():
                raise RuntimeError(
                    f"{folder} was free when this run was attached, and another has taken it "
                    "since: start again, or give each its own dsx.metrics.dir"
                ) from None
            if error.errno in _OF_THE_DISK:  # what is written later counts what is missing
                return f"{folder} cannot be written to ({error.strerror}): training goes on"
            raise RuntimeError(
                f"dsx.metrics.dir: {folder} cannot be written to ({error.strerror}); give a folder "
                "that can be made and written by cluster "
                f"{self._cluster}, or null: no records are written"
            ) from error
        return "" if self._number == 1 else self._say_why(origin)

    def _is_of_run(self, number: int, session: str) -> bool:
        """Whether no file of these clusters in a folder is of another run than a session's."""
        held = [one.get(str(number), []) for one in self._found]
        known = [set(names) for names in held if names]
        own = {session}
        for _ in known:
            own.update(*(names for names in known if own & names))
        if not known:
            return None in held  # of dsx 0.1, which has not said whose they are
        return all(own & names for names in known)

    def _say_why(self, origin: Origin | None) -> str:
        """Say which run has the name; by one of the clusters that share a file system."""
        assert self._base is not None
        if self._cluster and cluster_file(self._base, "metrics", ".jsonl", 0).exists():
            return ""
        told = read_about(self._base, self._cluster) if self._base.is_dir() else {}
        about = told.get(self._cluster)
        what = ""
        if about:
            last = about["starts"][-1]
            what = f" (begun {last['time']}; {say_end(last)})"
        elif "1" not in self._found[self._cluster]:
            what = " in another cluster"
        than = f" than {origin.path}" if origin else ""
        return f"{self._base} holds another run{what}{than}: this one's folder is {self.folder}"
