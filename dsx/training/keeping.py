"""Keeping the last few checkpoints: what is older goes, once all clusters have what is newer.

A cluster tells the others of a good checkpoint beside its next transfer (notices.py): nothing
waits. Deletion runs on a thread of its own; what cannot be deleted is a warning.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from dsx.checkpoint.checksums import MANIFEST, read_manifest
from dsx.checkpoint.keep import counts, remove_tag, superfluous
from dsx.checkpoint.tags import complete_tags
from dsx.training.copying import Copying
from dsx.training.notices import Notices

logger = logging.getLogger(__name__)
_KIND = "saved"
_DEADLINE_SECONDS = 60.0


class Keeping:
    """One rank's part: the first of a cluster tells and deletes, the others listen.

    `keep` is how many stay; None: all. `members` are the clusters that train, `forget` is told of
    each one that is deleted. `copying` copies what all have to a remote place, if there is one.
    """

    def __init__(
        self,
        notices: Notices,
        members: Callable[[], Collection[int]],
        is_first: bool,
        keep: int | None,
        forget: Callable[[Path], None],
        copying: Copying | None = None,
    ) -> None:
        self._notices = notices
        self._members = members
        self._is_first = is_first
        self._keep = keep
        self._forget = forget
        self._copying = copying
        self._directories: dict[tuple[str, int], Path] = {}  # of this cluster, by tag and step
        self._having: dict[tuple[str, int], set[int]] = {}  # clusters, by tag and step
        self._common: dict[Path, set[str]] = {}  # tags that all have, by directory
        self._thread: threading.Thread | None = None

    def saved(self, path: Path, step: int) -> None:
        """Tell all clusters that this one has a checkpoint complete, if it is a good one."""
        if (self._keep is None and self._copying is None) or not self._is_first:
            return
        manifest = path / MANIFEST  # none where a script saves by itself
        if manifest.is_file() and counts(read_manifest(manifest)):
            self._directories[path.name, step] = path.parent
            if self._copying is not None:
                self._copying.saved(path, step)
            self._notices.post(_KIND, {"tag": path.name, "step": step})

    def loaded(self, path: Path) -> None:
        """Enter a checkpoint that all clusters have loaded."""
        self._common.setdefault(path.parent, set()).add(path.name)

    def marked(self, path: Path) -> None:
        """Take that a checkpoint is none to go on from any more: its manifest says so."""
        if self._copying is not None:
            self._copying.mark(path)

    def pass_boundary(self) -> None:
        """Listen; delete what is superfluous now."""
        for notice in self._notices.due(_KIND):
            key = (notice.payload["tag"], notice.payload["step"])
            self._having.setdefault(key, set()).add(notice.cluster)
            directory = self._directories.get(key)
            if directory is not None and self._having[key] >= {*self._members()}:
                self._common.setdefault(directory, set()).add(key[0])
                if self._keep is not None:
                    self._begin(directory)
                if self._copying is not None:
                    self._copying.held_by_all(directory / key[0], key[1])
        if self._copying is not None:
            self._copying.pass_boundary()

    def close(self) -> None:
        """Return once what was begun is deleted, or after a minute, and the last one is copied."""
        if self._thread is not None:
            self._thread.join(_DEADLINE_SECONDS)
        if self._copying is not None:
            self._copying.end()

    def _begin(self, directory: Path) -> None:
        before, common = self._thread, set(self._common[directory])

        def work() -> None:
            if before is not None:
                before.join()
            self._delete(directory, common)

        self._thread = threading.Thread(target=work, name="old-checkpoints", daemon=True)
        self._thread.start()

    def _delete(self, directory: Path, common: set[str]) -> None:
        assert self._keep is not None
        try:
            gone = superfluous(complete_tags(directory), common, self._keep)
            for tag in gone:
                if self._copying is not None and self._copying.holds(directory / tag):
                    continue  # it goes with the next one
                remove_tag(directory, tag)
                self._forget(directory / tag)
                logger.info("%s is deleted: checkpoints.keep=%d", directory / tag, self._keep)
        except OSError as error:
            logger.warning("an old checkpoint stays: %s", error)
