"""Which build a dataset is of, by its dataset.json, and how builds of several clusters compare."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsx.data.cluster_batches import ClusterBatches, ClusterShard
from dsx.data.manifest import SPLITS, read_manifest, read_summary
from dsx.data.overlap import share_in
from dsx.data.windows import TokenWindows


@dataclass(frozen=True)
class Build:
    """A split of a dataset, as its manifest has it: `content` is the hash of all its tokens."""

    name: str
    content: str
    tokenizer: str
    sketch: tuple[str, ...]


def build_of(prefix: str | os.PathLike[str]) -> Build | None:
    """Return the build that `prefix`, a path without .bin, is a split of; None if it is of none.

    A manifest beside files of another size counts for nothing.
    """
    path = Path(prefix)
    if path.name not in SPLITS or read_manifest(path.parent) is None:
        return None
    try:
        summary = read_summary(path.parent)
        size = path.with_name(f"{path.name}.bin").stat().st_size
    except (ValueError, OSError):  # of a later dsx, or not there
        return None
    if size != getattr(summary, path.name).num_tokens * np.dtype(summary.dtype).itemsize:
        return None
    content = f"{summary.content_digest}/{path.name}"
    return Build(str(prefix), content, summary.tokenizer, summary.sketch)


def common_share(first: Build, second: Build) -> float:
    """Return about which share of the documents are in both builds: of the one that has fewer."""
    return max(share_in(first.sketch, second.sketch), share_in(second.sketch, first.sketch))


def require_one_tokenizer(builds: Sequence[tuple[int, Build]]) -> None:
    """Raise ValueError where clusters' builds have other tokenizers, whosever data it is."""
    for cluster, build in builds:
        first, other = builds[0]
        if build.tokenizer != other.tokenizer:
            raise ValueError(
                f"training data of cluster {first} ({other.name}) has the tokenizer "
                f"{other.tokenizer!r}, that of cluster {cluster} ({build.name}) "
                f"{build.tokenizer!r}: the same ids would be other texts; build both with the same "
                "--tokenizer of dsx data build"
            )


def difference(first: tuple[int, Build], second: tuple[int, Build]) -> str:
    """Return what is said of two clusters whose builds are not the same."""
    share = common_share(first[1], second[1])
    both = f", and about {100 * share:.0f} % of the documents are in both" if share else ""
    told = [f"cluster {n}'s {build.name} is {build.content}" for n, build in (first, second)]
    return (
        f"the training data differs: by the content_digest of dataset.json {told[0]}, and "
        f"{told[1]}{both}"
    )


def require_same(
    dataset: TokenWindows | ClusterShard | ClusterBatches, gather: Callable[[Any], list[Any]]
) -> None:
    """Raise ValueError, in all clusters, unless they share one build of a dataset.

    For scripts with a loader of their own: `require_same(batches, engine.dsx.gather)`. Collective
    over all ranks. Data without a dataset.json is not compared.
    """
    windows: Any = dataset
    while isinstance(windows, (ClusterBatches, ClusterShard)):
        windows = windows.shard if isinstance(windows, ClusterBatches) else windows.dataset
    own = build_of(windows.prefix) if isinstance(windows, TokenWindows) else None
    told = gather(None if own is None else asdict(own))
    known = [(cluster, Build(**build)) for cluster, build in enumerate(told) if build]
    require_one_tokenizer(known)
    for other in known[1:]:
        if other[1].content != known[0][1].content:
            raise ValueError(
                f"{difference(known[0], other)}; copy one of them to the other site (dsx data "
                "check says whether it has come whole). Data of each cluster's own is read whole, "
                "by ClusterBatches(..., cluster_id=0, num_clusters=1)"
            )
