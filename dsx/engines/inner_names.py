"""Names that an adapter takes from inside its engine, and what is said where a release lacks one.

An engine's own modules may rename them in any release. Each adapter lists those it uses in one
table, with the release that had them first, and looks for them before it builds or attaches
anything: a release that lacks one is told by it, and not by an AttributeError in the midst of a
run.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class InnerName:
    """A name of a module, or of a class as `module:Class`; dsx needs it `so_that` something is.

    `since`: the first release that has it, empty where the oldest that was looked at has.
    """

    owner: str
    name: str
    so_that: str
    since: str = ""

    def is_there(self) -> bool:
        """Whether what is installed has it; imports its module."""
        module, _, kind = self.owner.partition(":")
        try:
            found: object = importlib.import_module(module)
        except ModuleNotFoundError:
            return False
        found = getattr(found, kind, None) if kind else found
        return hasattr(found, self.name)


@dataclass(frozen=True)
class KnownReleases:
    """The releases of a package in which the names were looked for: from `first` to `last`."""

    package: str
    first: str
    last: str
    advice: str

    def require(self, names: Iterable[InnerName], version: str) -> None:
        """Raise RuntimeError for the first name that an installed version lacks."""
        for one in names:
            if not one.is_there():
                where = one.owner.rpartition(".")[2].replace(":", ".")
                raise RuntimeError(
                    f"{self.package} {version} has no {where}.{one.name}, by which {one.so_that}: "
                    f"{self._when(one, version)}; {self.advice}"
                )

    def _when(self, one: InnerName, version: str) -> str:
        since = one.since or self.first
        if numbers_of(version) < numbers_of(since):
            return f"it is there since {since}"
        return f"it was there from {since} to {self.last}, and is gone since"


def numbers_of(version: str) -> list[int]:
    """Return the first three numbers of a version, to be compared."""
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
