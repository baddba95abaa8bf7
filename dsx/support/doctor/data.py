"""Which data the clusters would read: the same to be split, each its own, or some of it twice.

Datasets are looked at by their dataset.json alone, a copy of which can come from another site.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from dsx.config.schema import DsxConfig
from dsx.data.manifest import MANIFEST, BuildSummary, read_summary
from dsx.data.overlap import MANY, share_in
from dsx.support.doctor.finding import Finding


def read_data(paths: Sequence[Path], num_clusters: int) -> list[BuildSummary]:
    """Return what each cluster has, one for all or one each; ValueError for another number."""
    if len(paths) not in (1, num_clusters):
        raise ValueError(
            f"--data is given {len(paths)} times, for {num_clusters} clusters: give it once for "
            "data that all share, or once per cluster, in their order"
        )
    return [read_summary(path.parent if path.name == MANIFEST else path) for path in paths]


def look_at_data(config: DsxConfig, found: Sequence[BuildSummary]) -> list[Finding]:
    """Return a finding for what clusters have in common; a note if no data is told."""
    if not found:
        text = (
            "what clusters have in common is told with --data DIR of dsx data build: once for all, "
            "or once per cluster"
        )
        return [Finding("note", "data", text)]
    count, wanted = config.clusters.num_clusters, config.clusters.data
    tokens = f"{found[0].train.num_tokens:,} tokens"
    others = {each.tokenizer for each in found}
    if len(others) > 1:
        text = (
            f"the clusters' datasets have several tokenizers, {', '.join(sorted(others))}: the "
            "same ids would be other texts; build all with one"
        )
        return [Finding("STOP", "data", text)]
    if count > 1 and len({each.content_digest for each in found}) == 1:
        text = f"{found[0].path} is of all clusters: {tokens}, content_digest "
        text += found[0].content_digest
        if wanted == "own":
            text += ', and clusters.data is "own": all would read the same; leave that out'
            return [Finding("STOP", "data", text)]
        return [Finding("ok", "data", f"{text}; each of {count} reads a part of its own")]
    if count == 1:
        return [Finding("ok", "data", f"{found[0].path}: {tokens}")]
    return _of_pairs(found, wanted)


def _of_pairs(found: Sequence[BuildSummary], wanted: str) -> list[Finding]:
    told: list[Finding] = []
    for (one, first), (two, second) in combinations(enumerate(found), 2):
        both = f"clusters {one} and {two} ({first.path}, {second.path})"
        if not (first.sketch and second.sketch):
            text = f"{both}: an earlier dsx has built one; built anew, they tell what they share"
            told.append(Finding("note", "data", text))
            continue
        is_same = first.content_digest == second.content_digest
        shares = share_in(first.sketch, second.sketch), share_in(second.sketch, first.sketch)
        share = 1.0 if is_same else max(shares)
        text = f"{both} have about {100 * share:.0f} % of their documents in common"
        if wanted == "split" and not is_same:
            text += ', and clusters.data is "split", for which they have to be the same; copy one'
            told.append(Finding("STOP", "data", text))
        elif share >= MANY and wanted != "own":
            text += (
                ": another build of the same, which a run refuses; copy one of them, or say "
                'clusters.data "own" if each cluster is to read all of its own'
            )
            told.append(Finding("STOP", "data", text))
        elif share:
            told.append(Finding("note", "data", f"{text}, which both read"))
    if told:
        return told
    text = (
        "the clusters' datasets have no documents in common; where dsx divides the data "
        "(clusters.data), each reads all of its own"
    )
    return [Finding("ok", "data", text)]
