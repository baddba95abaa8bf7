"""Which saves all clusters hold, and which one has failed in, as they tell beside transfers.

A save is known by its name and its step. All hear the same at one boundary (notices.py), so all
come to the same. A cluster tells of its saves in their order: one that has told of a later save of
a name and not of an earlier one does not hold that. One that is back from a loss has heard nothing
of before, so the others tell it what all held.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from dsx.checkpoint.written_again import Version
from dsx.training.notices import Notices

Save = tuple[str, int]  # name and step
_HELD, _FAILED, _COMMON = "saved", "unsaved", "common"
_MOST_RANGES = 128  # that a notice has room for


class CommonSaves:
    """One rank's part; `members` are the clusters that train."""

    def __init__(self, notices: Notices, members: Callable[[], Collection[int]]) -> None:
        self._notices = notices
        self._members = members
        self._holders: dict[Save, set[int]] = {}
        self._needed: dict[Save, set[int]] = {}  # clusters that have to hold it, as they have told
        self._ranges: dict[Save, list[list[tuple[int, int]]]] = {}  # of which those are made
        self._failed: dict[Save, set[int]] = {}
        self._own: dict[Save, frozenset[int]] = {}  # this cluster's: who has to hold it
        self._met: set[int] = set()  # who trained at the last boundary
        self._told: dict[str, Version] = {}  # by name: what others have said that all held

    def tell(self, save: Save, needed: Collection[int]) -> None:
        """Tell all that this cluster holds a save which so many clusters have to hold."""
        self._own[save] = frozenset(needed)
        told = {"tag": save[0], "step": save[1], "members": _ranges_of(needed)}
        self._notices.post(_HELD, told)

    def tell_failed(self, save: Save) -> None:
        """Tell all that this cluster has none of that name and step."""
        self._notices.post(_FAILED, {"tag": save[0], "step": save[1]})

    def tell_who_is_back(self, known: Callable[[], Mapping[str, Version]]) -> None:
        """Tell what all held, by name, where clusters train that did not at the last boundary."""
        before, self._met = self._met, {*self._members()}
        for name, (step, session) in known().items() if before and self._met - before else ():
            self._notices.post(_COMMON, {"tag": name, "step": step, "session": session})

    def said_of(self, name: str) -> Version | None:
        """Return what others have said that all held of a name, before this cluster came back."""
        return self._told.get(name)

    def hear(self) -> list[Save]:
        """Return what all hold by what has come since the last call, in an order that all share.

        All are those who trained when it was saved: a load goes on from it without the others.
        """
        for notice in self._notices.due(_FAILED):
            save = notice.payload["tag"], notice.payload["step"]
            self._failed.setdefault(save, set()).add(notice.cluster)
        for notice in self._notices.due(_COMMON):
            version = Version(notice.payload["step"], notice.payload["session"])
            name = notice.payload["tag"]
            self._told[name] = max(version, self._told.get(name, version))
        common: list[Save] = []
        for notice in self._notices.due(_HELD):
            save = notice.payload["tag"], notice.payload["step"]
            holders = self._holders.setdefault(save, set())
            holders.add(notice.cluster)
            needed = self._needed.setdefault(save, set())
            told = [(first, last) for first, last in notice.payload.get("members", ())]
            if told not in (before := self._ranges.setdefault(save, [])):  # as most tell the same
                before.append(told)
                needed.update(m for first, last in told for m in range(first, last + 1))
            if holders >= (needed or {*self._members()}):
                common.append(save)
        return common

    def failing(self, tag: str) -> Callable[[int], bool]:
        """Return what says of a step whether a cluster that has to hold a name is known not to."""
        told: dict[int, set[int]] = {}
        for (name, step), holders in self._holders.items():
            for cluster in holders if name == tag else ():
                told.setdefault(cluster, set()).add(step)

        def is_failing(step: int) -> bool:
            save = tag, step
            lacking = {m for m, steps in told.items() if step not in steps and max(steps) > step}
            lacking |= self._failed.get(save, set()) - self._holders.get(save, set())
            return bool(lacking & self._own.get(save, lacking))

        return is_failing

    def loaded(self, step: int) -> None:
        """Take that all go on from a checkpoint of this step: what was told of later ones is void.

        On all ranks of all clusters.
        """
        self._told = {name: told for name, told in self._told.items() if told.step <= step}
        for kind in (_HELD, _FAILED, _COMMON):
            self._notices.take_back(kind, lambda told: told["step"] > step)
        for known in (self._holders, self._needed, self._ranges, self._failed, self._own):
            for save in [save for save in known if save[1] > step]:
                del known[save]


def _ranges_of(clusters: Collection[int]) -> list[tuple[int, int]]:
    """Return clusters as ranges, first and last of each; of very many, with what lies between."""
    found: list[tuple[int, int]] = []
    for cluster in sorted(clusters):
        if found and (cluster == found[-1][1] + 1 or len(found) == _MOST_RANGES):
            found[-1] = found[-1][0], cluster
        else:
            found.append((cluster, cluster))
    return found
