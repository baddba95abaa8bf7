"""Where a checkpoint lies on the disk: which part of its path is its cluster's, which its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    """Where a checkpoint lies: below `base`, of `cluster` (`cluster_<m>`), named `tag`."""

    base: Path
    cluster: str
    tag: str


Lies = Callable[[Path], Place]


def by_cluster(path: Path) -> Place:
    """Take a path as `<base>/cluster_<m>/<tag>`, as dsx's own are."""
    return Place(path.parents[1], path.parent.name, path.name)


def by_tag(path: Path) -> Place:
    """Take a path as `<base>/<tag>/cluster_<m>`, as Accelerate's are."""
    return Place(path.parents[1], path.name, path.parent.name)
