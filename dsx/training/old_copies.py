"""Which copies at a remote place go: what `checkpoints.keep` lets go, and what a library deleted.

A copy of what the Trainer, Lightning or Accelerate has deleted on the disk goes once all clusters
have another one there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from dsx.checkpoint.checksums import name_of
from dsx.checkpoint.keep import superfluous
from dsx.checkpoint.remote import Remote

logger = logging.getLogger(__name__)


class OldCopies:
    """A cluster's; `keep` is how many stay of those that all clusters have, None: all."""

    def __init__(self, remote: Remote, keep: int | None, cluster: int) -> None:
        self._remote, self._keep, self._cluster = remote, keep, cluster
        self._gone: set[str] = set()

    def gone(self, tag: str) -> None:
        """Take that a library has deleted a checkpoint; from any thread."""
        self._gone.add(tag)

    def saved(self, tag: str) -> None:
        """Take that there is one of this name, again."""
        self._gone.discard(tag)

    def delete(self, common: Mapping[str, int]) -> None:
        """Delete what may go, where all clusters have `common`: tags, and of which steps. A warning
        if that cannot be.
        """
        gone = {*self._gone}
        if self._keep is None and not gone:
            return
        try:
            there = self._remote.tags(self._cluster)
            old = superfluous(there, common, self._keep) if self._keep is not None else []
            for tag in there:
                if tag in old or name_of(tag) in gone:
                    self._remote.remove(self._cluster, tag)
                    place = self._remote.place(self._cluster, tag)
                    why = f"checkpoints.keep={self._keep}" if tag in old else "as it is on the disk"
                    logger.info("%s is deleted: %s", place, why)
            self._gone -= gone
        except Exception as error:  # noqa: BLE001 - each file system has errors of its own
            logger.warning(
                "an old checkpoint at %s stays: %s: %s", self._remote.url, type(error).__name__,
                error,
            )  # fmt: skip
