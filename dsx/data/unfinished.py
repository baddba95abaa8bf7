"""The folder beside a dataset in which it is built: `.NAME.partial`, which outlives a kill.

One build at a time holds it, by a lock that the system lets go of when its process ends. What is
finished in it is taken up by the next build of the dataset; what that does not need is deleted.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

_LOCK, _PARTS, _DATASET = "lock", "parts", "dataset"


class Unfinished:
    """The folder of a build that is under way."""

    def __init__(self, target: Path) -> None:
        self.folder = target.with_name(f".{target.name}.partial")
        self.parts = self.folder / _PARTS
        self.dataset = self.folder / _DATASET
        self._target = target
        self._old = target.with_name(f".{target.name}.old")
        self._made: list[Path] = []  # folders above, the innermost first

    @contextmanager
    def held(self) -> Generator[None, None, None]:
        """Make it, and keep other builds out; ValueError where one is under way."""
        self._made = [path for path in self.folder.parents if not path.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / _LOCK).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"{self._target} is being built by another process, which holds {lock.name}; "
                    "wait for it, or choose another --out"
                ) from None
            self._recover()
            self.parts.mkdir(exist_ok=True)
            shutil.rmtree(self.dataset, ignore_errors=True)  # files were being put together
            yield

    def tidy(self) -> None:
        """Delete what a kill has left behind a dataset that is complete."""
        if self.folder.exists() or self._old.exists():
            with self.held():
                self.remove()

    def keep_parts(self, names: Iterable[str]) -> None:
        """Delete what is of no part with one of these names: of other sources, or half written."""
        wanted = set(names)
        for path in self.parts.iterdir():
            name, _, ending = path.name.partition(".")
            if name not in wanted or ending not in ("npz", "tokens"):
                path.unlink()

    def has_parts(self) -> bool:
        """Whether anything that is finished is in it."""
        return self.parts.is_dir() and any(self.parts.glob("*.npz"))

    def _recover(self) -> None:
        """Put the dataset back that a kill has left moved aside."""
        if self._old.exists():
            if self._target.exists():
                shutil.rmtree(self._old)
            else:
                self._old.rename(self._target)

    def publish(self) -> None:
        """Rename the finished dataset to its place; one that is there is moved aside first."""
        if self._target.exists():
            self._target.rename(self._old)
        self.dataset.rename(self._target)
        shutil.rmtree(self._old, ignore_errors=True)
        self.remove()

    def remove(self) -> None:
        """Delete it, and the folders that were made for it and hold nothing."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for path in self._made:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
