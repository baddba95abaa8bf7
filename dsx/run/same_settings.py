"""What the Trainers of all clusters have to have alike: settings of a framework's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def differing(told: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the settings that are not the same in all clusters, and what each one has.

    `told` has one mapping per cluster, all with the same keys.
    """
    for name, first in told[0].items():
        values = [cluster[name] for cluster in told]
        if any(value != first for value in values):
            yield name, ", ".join(f"cluster {m}: {value}" for m, value in enumerate(values))
