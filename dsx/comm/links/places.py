"""Where ranks of a cluster are called, as clusters tell each other."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Place = tuple[str | None, int, int]  # address, slot there, incarnation


@dataclass(frozen=True)
class Ranks:
    """Where the ranks of one cluster are called, by number."""

    places: tuple[Place, ...]

    @classmethod
    def of(cls, places: Iterable[Any]) -> Ranks:
        """Return what JSON has made of places; ValueError or TypeError for anything else."""
        return cls(tuple((a, int(slot), int(process)) for a, slot, process in places))

    def pack(self) -> str:
        """Return it as a text: some 50 bytes a rank."""
        return json.dumps(self.places)

    @classmethod
    def unpack(cls, text: str) -> Ranks:
        """Return what `pack` has made a text."""
        return cls.of(json.loads(text))
