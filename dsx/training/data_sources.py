"""Whose data is it? Shared by all clusters and to be split, or each cluster's own and read whole.

Split once more, a site would skip most of its own data; not split, all sites would read the same
samples. So the clusters compare what they have, by the digest of its content where it can be read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

from dsx.comm.rendezvous import Rendezvous
from dsx.data.identity import Build, common_share, difference, require_one_tokenizer
from dsx.data.overlap import MANY

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """A part of a cluster's data: `name` for people, `digest` of its content, if it is known.

    `weight` is its share in a blend, as it was given; `build` what dataset.json says of it, of a
    dataset of `dsx data build`.
    """

    name: str
    digest: str | None
    num_tokens: int | None = None
    weight: str | None = None
    build: Build | None = None

    @property
    def identity(self) -> str:
        """What tells it from others: its content, else its name."""
        return self.digest or self.name


def describe(sources: Sequence[Source]) -> str:
    """Return what a line says of a cluster's data."""
    if not sources:
        return "data of the script's own"
    shown = [source.name for source in sources[:3]] + ["..."] * (len(sources) > 3)
    sizes = [source.num_tokens for source in sources if source.num_tokens is not None]
    tokens = f" ({sum(sizes):,} tokens)" if len(sizes) == len(sources) else ""
    return " + ".join(shown) + tokens


def share_data(rendezvous: Rendezvous, wanted: str, own: Sequence[Source]) -> bool:
    """Return whether training data is to be split between clusters.

    Collective over all ranks of all clusters. `wanted` is `clusters.data`; "auto" is decided by
    what the clusters have: the same, or nothing in common. ValueError, in all of them, where that
    cannot be told.
    """
    told = rendezvous.gather("training data", [asdict(source) for source in own])
    everyone = [[_source(entry) for entry in entries] for entries in told]
    _require_one_build(everyone, wanted)
    is_same, common = are_same(everyone), _in_common(everyone)
    if wanted == "auto":
        if not is_same:
            _require_disjoint(everyone, common)
        return is_same
    if rendezvous.is_speaker and wanted == "split" and not is_same:
        logger.warning(
            "clusters.data='split', but the clusters have different training data: each skips "
            "%d of %d parts of its own; 'own' reads all of it", len(everyone) - 1, len(everyone),
        )  # fmt: skip
    if rendezvous.is_speaker and wanted == "own" and common:
        logger.warning(
            "clusters.data='own', but %s: they read the same samples; 'split' divides them", common
        )
    return wanted == "split"


def _source(entry: dict[str, Any]) -> Source:
    source = Source(**entry)
    build: Any = entry["build"]
    return source if build is None else replace(source, build=Build(**build))


def _require_one_build(everyone: Sequence[Sequence[Source]], wanted: str) -> None:
    """Raise ValueError where clusters have several builds of what seems to be the same data.

    That is so for what is said to be shared, and for builds with many documents in common that
    nobody has said to be each cluster's own.
    """
    builds = [
        (cluster, source.build)
        for cluster, own in enumerate(everyone)
        for source in own
        if source.build is not None
    ]
    require_one_tokenizer(builds)
    if wanted == "own":
        return
    for first, second in combinations(builds, 2):
        if first[0] == second[0] or first[1].content == second[1].content:
            continue
        places = [[s.build for s in everyone[n]].index(build) for n, build in (first, second)]
        is_meant = wanted == "split" and places[0] == places[1]
        if is_meant or common_share(first[1], second[1]) >= MANY:
            raise ValueError(
                f"{difference(first, second)}; copy one of them to the other site (dsx data check "
                "says whether it has come whole), or say clusters.data='own', with which each "
                "cluster reads all of its own"
            )


def are_same(everyone: Sequence[Sequence[Source]]) -> bool:
    """Whether all clusters have the same sources, of the same weights, in the same order."""
    blends = [[(source.identity, source.weight) for source in own] for own in everyone]
    return all(blend == blends[0] for blend in blends)


def _in_common(everyone: Sequence[Sequence[Source]]) -> str:
    """Return which two clusters share which data; empty if none do."""
    holders: dict[str, tuple[int, Source]] = {}
    for cluster, own in enumerate(everyone):
        for source in own:
            first, shared = holders.setdefault(source.identity, (cluster, source))
            if first != cluster:
                return f"clusters {first} and {cluster} both have {shared.name}"
    return ""


def _require_disjoint(everyone: Sequence[Sequence[Source]], common: str) -> None:
    advice = (
        "say which it is: clusters.data='split' for data that all clusters share, of which each "
        "reads its part, or 'own' for data of each cluster's own, which it reads whole"
    )
    if common:
        raise ValueError(f"{common}, but not all of their training data is the same; {advice}")
    unknown = [source.name for own in everyone for source in own if source.digest is None]
    if unknown:
        raise ValueError(
            f"the clusters name different training data, and the content of {unknown[0]} cannot be "
            f"read here to see whether it is the same; {advice}"
        )
