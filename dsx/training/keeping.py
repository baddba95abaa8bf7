"""Keeping the last few checkpoints: what is older goes, once all clusters have what is newer.

A cluster tells the others of a good checkpoint beside its next transfer (notices.py): nothing
waits. Deletion runs on a thread of its own; what cannot be deleted is a warning.

What a library (the Trainer, Lightning, Accelerate) deletes as soon as its save returns waits here
in the same way, where that save is written beside training, or copied to a remote place: until all
clusters hold it, and while the older one is being copied.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dsx.checkpoint.checksums import HELD, MANIFEST, REPLACED, name_of, read_manifest
from dsx.checkpoint.keep import counts, delete_taken, superfluous, take_away
from dsx.checkpoint.places import Lies, by_cluster
from dsx.checkpoint.tags import complete_tags
from dsx.checkpoint.written_again import Version, hold_back, put_back, version_of, versions
from dsx.training.common_saves import CommonSaves, Save
from dsx.training.copying import Copying
from dsx.training.notices import Notices
from dsx.training.whole import Whole

logger = logging.getLogger(__name__)
_DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class _PutOff:
    """What a library would delete; `save` is the number of the save that comes in its place."""

    path: Path
    delete: Callable[[], object]
    save: int


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
        self._saves = CommonSaves(notices, members)
        self._is_first = is_first
        self._keep = keep
        self._forget = forget
        self._copying = copying
        self.lies: Lies = by_cluster  # where a checkpoint's cluster and tag stand in its path
        self._whole: Whole | None = None
        self.is_of_library = False  # whether what is deleted has waited in this process
        self._put_off: list[_PutOff] = []
        self._is_over = False  # whether all clusters hold a library's last save
        self._begun = 0  # saves of the library's
        self._numbers: dict[Save, int] = {}  # of them
        self._paths: dict[Save, Path] = {}  # of this cluster
        self._versions: dict[Save, Version] = {}
        self._common: dict[Path, dict[str, int]] = {}  # what all have: steps by folder and tag
        self._tried: dict[Path, set[int]] = {}  # saves that were begun: steps by folder
        self._known: dict[Path, Version] = {}  # what all have, by the folder that was saved to
        self._before: dict[Path, set[Version]] = {}  # what was there before this process saved
        self._folders: dict[Path, Path] = {}  # by what was begun, what is told: a part's is whole
        self._told_of: set[Path] = set()  # of which nothing is known to be common
        self._of_folders = threading.Lock()  # held while folders are given other names
        self._waiting: list[tuple[Path, int]] | None = None  # for the engine's own part
        self._thread: threading.Thread | None = None

    def serve_library(self, lies: Lies = by_cluster, whole: Whole | None = None) -> None:
        """Let a library's deletions wait; its checkpoints are tags, or folders `whole` knows.

        Every rank of every cluster calls it alike, before the first save.
        """
        self.is_of_library, self.lies, self._whole = True, lies, whole
        if self._copying is not None:
            self._copying.take_places(lies)

    def begin(self) -> None:
        """Take that a library begins a save; `put_off` behind it waits for this one."""
        self._begun += 1

    def put_off(self, path: Path, delete: Callable[[], object]) -> None:
        """Let the first rank delete a checkpoint once all clusters hold what was begun last."""
        if self._is_first:
            self._put_off.append(_PutOff(path.absolute(), delete, self._begun))

    def end_of_library(self, gather: Callable[[Any], list[Any]]) -> None:
        """Delete what has waited, if all clusters hold the last save. Collective over all.

        Once nothing is being written any more. A cluster that has saved nothing in this process
        takes part, as the others cannot know, and what they have stays.
        """
        has_last = self._begun in self._numbers.values() or not self._is_first
        if all(gather(has_last)):
            self._is_over = True
            self._delete_put_off(self._begun)

    def saved(self, path: Path, step: int) -> None:
        """Take a complete tag of this cluster: a checkpoint, or a part of a library's."""
        if self._whole is not None:
            self._whole.entered(path)
        else:
            self.hold(path, step)

    def hold(self, path: Path, step: int) -> None:
        """Tell all clusters that this one has a checkpoint complete, if it is a good one."""
        if not self._is_first:
            return
        if self._waiting is not None:
            self._waiting.append((path, step))
            return
        manifest = path / MANIFEST  # none where a script saves by itself
        if manifest.is_file() and counts(told := read_manifest(manifest)):
            save = self.lies(path).tag, step
            self._paths[save], self._numbers[save] = path, self._begun
            self._versions[save] = Version(step, told.get("session", ""))
            if self._copying is not None:
                self._copying.saved(path, step)
            self._saves.tell(save, told.get("members") or range(told["num_clusters"]))

    def failed(self, path: Path, step: int) -> None:
        """Tell all clusters that this one has not saved there at this step."""
        folder = self._folders.get(path)
        if folder is not None and self._is_first:
            self._saves.tell_failed((self.lies(folder).tag, step))

    @contextmanager
    def behind_engine(self) -> Generator[None, None, None]:
        """Tell the others of what is complete inside only as this ends: the engine's part is, too.

        Not of what has been taken back by then, and of nothing where an error ends the run.
        """
        self._waiting = []
        try:
            yield
            waiting = self._waiting
        finally:
            self._waiting = None
        for path, step in waiting:
            self.hold(path, step)

    def take_back(self, path: Path) -> None:
        """Take that a checkpoint of `behind_engine` is none: the engine's part has failed."""
        if self._waiting is not None:
            self._waiting = [one for one in self._waiting if one[0] != path]

    def loaded(self, path: Path, step: int) -> None:
        """Enter a checkpoint that all clusters have loaded; not what its tag holds besides."""
        # later steps are saved anew, here and elsewhere: what was of them makes none superfluous,
        # and what is still to be told of them is not of what has its name by then
        self._saves.loaded(step)
        self._known = {of: known for of, known in self._known.items() if known.step <= step}
        for directory, common in self._common.items():
            self._common[directory] = {tag: of for tag, of in common.items() if of <= step}
        if self._copying is not None:
            self._copying.loaded(step)
        common, tag = self._common_in(path.parent), name_of(path.name)
        for name in (tag, f"{tag}{REPLACED}", f"{tag}{HELD}"):
            common.pop(name, None)
        self._tried = {of: {at for at in tried if at <= step} for of, tried in self._tried.items()}
        common[path.name] = step
        if (version := version_of(path)) is not None:
            self._known[(path.parent / tag).resolve()] = version

    def make_way(self, directory: Path, tag: str, step: int) -> bool:
        """Let what all clusters hold of a tag stay, which is about to be written, of this step.

        What all have loaded as `<tag>.replaced` is `tag` again. Else this save, or the next, would
        delete it, and leave what other clusters may not have. Return whether it was so. On the
        first rank; OSError.
        """
        path = directory / tag
        folder = self._folders[path] = path if self._whole is None else directory
        with self._of_folders:
            was_put_back = self._put_back(directory, tag)
            self._tried.setdefault(folder.resolve(), set()).add(step)
            found = {*versions(directory, tag).values()}
            before = self._before.setdefault(path.resolve(), found)
            if len(found) > 1:
                known = self._known_of(path, folder)
                said = self._saves.said_of(self.lies(folder).tag)
                if known is None and said is not None and said in found:
                    known = self._known[folder.resolve()] = said
                hold_back(directory, tag, known, before, self._saves.failing(self.lies(folder).tag))
                self._tell_of_unknown(path, known)
        return was_put_back

    def _known_of(self, *paths: Path) -> Version | None:
        known = [self._known[path.resolve()] for path in paths if path.resolve() in self._known]
        return max(known, default=None)

    def _known_by_name(self) -> dict[str, Version]:
        """Return what all hold of each name that has been saved more than once."""
        again = {self.lies(of).tag for of, tried in self._tried.items() if len(tried) > 1}
        found: dict[str, Version] = {}
        for folder, known in self._known.items():
            if (name := self.lies(folder).tag) in again:  # also of another cluster's, if loaded
                found[name] = max(known, found.get(name, known))
        return found

    def _tell_of_unknown(self, path: Path, known: Version | None) -> None:
        held = path.with_name(f"{path.name}{HELD}")
        if known is None and path not in self._told_of and (version := version_of(held)):
            self._told_of.add(path)
            logger.warning(
                "%s is saved again before any of its saves is known to be in all clusters: what it "
                "held of step %d stays as %s until one is", path, version.step, held.name,
            )  # fmt: skip

    def _put_back(self, directory: Path, tag: str) -> bool:
        common, was_put_back = self._common_in(directory), False
        for held in (f"{tag}{REPLACED}", f"{tag}{HELD}"):
            if held in common:
                of = common.pop(held)
                was_put_back = put_back(directory, tag, held)
                if was_put_back:
                    common[tag] = of
        return was_put_back

    def marked(self, path: Path) -> None:
        """Take that a checkpoint is none to go on from any more: its manifest says so."""
        if self._copying is not None:
            self._copying.mark(path)

    def pass_boundary(self) -> None:
        """Listen; delete what is superfluous now."""
        if self._is_first:
            self._saves.tell_who_is_back(self._known_by_name)
        for save in self._saves.hear():
            (tag, step), path = save, self._paths.get(save)
            if path is None or not self._is_held(path, step):
                continue
            common = self._common_in(path.parent)
            common[tag] = step
            self._known[path.resolve()] = self._versions[save]
            if self._keep is not None:
                self._begin(partial(self._delete, path.parent, {**common}))
            if self._copying is not None:
                self._copying.held_by_all(path, step)
            self._delete_put_off(self._numbers[save])
        if self._copying is not None:
            self._copying.pass_boundary()

    def _is_held(self, path: Path, step: int) -> bool:
        """Whether all clusters hold what they have told of: none has begun two saves there since.

        All tell the same at one boundary, and save at the same steps, also where a save fails.
        """
        later = [at for at in self._tried.get(path.resolve(), ()) if at > step]
        return len(later) <= 1

    def close(self) -> None:
        """Return once what was begun is deleted, or after a minute, and the last one is copied."""
        if self._thread is not None:
            self._thread.join(_DEADLINE_SECONDS)
        if self._copying is not None:
            self._copying.end()
        if self._is_over:  # what was being copied
            due, self._put_off = self._put_off, []
            self._delete_of_library(due)

    def _common_in(self, directory: Path) -> dict[str, int]:
        return self._common.setdefault(directory.resolve(), {})

    def _begin(self, delete: Callable[[], None]) -> None:
        before = self._thread

        def work() -> None:
            if before is not None:
                before.join()
            delete()

        self._thread = threading.Thread(target=work, name="old-checkpoints", daemon=True)
        self._thread.start()

    def _delete_put_off(self, save: int) -> None:
        """Delete what was put off behind this save, or one before; not what is being copied."""
        copying = self._copying
        due = [
            one
            for one in self._put_off
            if one.save <= save and not (copying is not None and copying.holds(one.path))
        ]
        self._put_off = [one for one in self._put_off if one not in due]
        if due:
            self._begin(partial(self._delete_of_library, due))

    def _delete_of_library(self, due: Collection[_PutOff]) -> None:
        for one in due:
            if not is_deleted(one.delete):
                continue
            self._forget(one.path)
            if self._copying is not None:
                self._copying.gone(one.path)

    def _delete(self, directory: Path, common: Mapping[str, int]) -> None:
        assert self._keep is not None
        try:
            held = complete_tags(directory)
            for tag in superfluous(held, common, self._keep):
                with self._of_folders:
                    if self._copying is not None and self._copying.holds(directory / tag):
                        continue  # it goes with the next one
                    if read_manifest(directory / tag / MANIFEST) != held[tag]:
                        continue  # a save has begun since, and what all hold may have this name
                    removed = take_away(directory, tag)
                delete_taken(removed)
                self._forget(directory / tag)
                logger.info("%s is deleted: checkpoints.keep=%d", directory / tag, self._keep)
        except OSError as error:
            logger.warning("an old checkpoint stays: %s", error)


def is_deleted(delete: Callable[[], object]) -> bool:
    """Delete an old checkpoint; return whether that is done. A warning says so where it cannot be,
    which is no end of the run: the other ranks would wait for this one.
    """
    try:
        delete()
    except OSError as error:
        logger.warning("an old checkpoint stays: %s", error)
        return False
    return True
