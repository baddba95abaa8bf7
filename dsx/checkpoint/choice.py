"""Which checkpoint a run goes on from where none is named: the newest good one that all hold.

Good is what is complete in all clusters, intact, and of a time when values were finite and no round
was refused, as the manifest says. What is newer and is not taken is told, with the reason. A crash
loop so ends: a checkpoint that is damaged, or that training diverges from, is not taken again.

The clusters try candidates in one order, and take the first that every rank of every cluster finds
intact: nothing is changed before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsx.checkpoint.checksums import DAMAGED
from dsx.checkpoint.tags import held_by, newest_first, offered, sources_of, tags_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A tag, and by cluster whose directory to take it from, and under which name."""

    tag: str
    step: int
    sources: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Passed:
    """A tag that is not taken, of which step if that is known, and why."""

    tag: str
    step: int | None
    why: str
    is_lacking: bool = False  # in a cluster, or not complete there


def candidates(
    found: Sequence[Sequence[Mapping[str, Any]]], base: str | Path
) -> tuple[list[Candidate], list[Passed]]:
    """Return what may be taken, the best first, and what may not.

    `found` is `tags_within_reach` of every cluster.
    """
    good: list[Candidate] = []
    passed: list[Passed] = []
    offers = offered(found)
    for tag, manifest in newest_first(offers, None):
        sources, lacking = sources_of(found, base, tag, manifest)
        why = lacking if sources is None else _trouble(found, sources)
        if sources is None or why:
            passed.append(Passed(tag, manifest["step"], why, sources is None))
        else:
            good.append(Candidate(tag, manifest["step"], tuple(sources)))
    tags = {tag for tag, _ in offers}
    for cluster, (own, _) in enumerate(found):
        for tag, manifest in own.items():
            if DAMAGED in manifest:
                passed.append(Passed(tag, None, f"cluster {cluster}: {manifest[DAMAGED]}"))
            elif cluster and tag not in tags:
                why = "cluster 0 does not hold it complete"
                passed.append(Passed(tag, manifest["step"], why, True))
    return good, passed


def newest_good(
    found: Sequence[Sequence[Mapping[str, Any]]],
    base: str | Path,
    examine: Callable[[Candidate], Sequence[str | None]],
    tells: bool,
    before: int | None = None,
) -> Candidate:
    """Return the newest candidate that is intact; all ranks of all clusters call it with the same.

    `examine` says by cluster what is wrong with one, the same on all ranks; what is of step
    `before` or later is not taken. FileNotFoundError where nothing is complete in all clusters,
    ValueError where that is not good.
    """
    good, passed = candidates(found, base)
    for candidate in good:
        if before is not None and candidate.step >= before:
            why = f"training had diverged at step {before}"
            passed.append(Passed(candidate.tag, candidate.step, why))
            continue
        wrong = _by_cluster(examine(candidate))
        if not wrong:
            if tells:
                _tell(candidate, passed)
            return candidate
        passed.append(Passed(candidate.tag, candidate.step, wrong))
    listed = "".join(f"; {one.tag}: {one.why}" for one in _newest(passed))
    if all(one.is_lacking for one in passed):
        raise FileNotFoundError(
            f"no complete checkpoint that all clusters hold under {base} from one run "
            f"({held_by(found)}){listed}"
        )
    raise ValueError(
        f"no good checkpoint that all clusters hold under {base} from one run "
        f"({held_by(found)}){listed}; name one (tag=...) to load it all the same, or bring an "
        "intact copy"
    )


def _trouble(
    found: Sequence[Sequence[Mapping[str, Any]]], sources: Sequence[tuple[int, str]]
) -> str:
    """Return what the manifests say against a tag, by cluster."""
    told: list[Any] = []
    for cluster, (source, tag) in enumerate(sources):
        manifest: Mapping[str, Any] = tags_of(found[cluster], cluster, source)[tag]
        told.append(manifest.get("trouble"))
    return _by_cluster(told)


def _by_cluster(told: Sequence[str | None]) -> str:
    return "; ".join(f"cluster {cluster}: {why}" for cluster, why in enumerate(told) if why)


def _newest(passed: Sequence[Passed]) -> list[Passed]:
    return sorted(passed, key=lambda one: (one.step is not None, -(one.step or 0), one.tag))


def _tell(candidate: Candidate, passed: Sequence[Passed]) -> None:
    newer = [one for one in _newest(passed) if one.step is None or one.step > candidate.step]
    if not newer:
        logger.info("takes checkpoint %s, of step %d", candidate.tag, candidate.step)
        return
    listed = "; ".join(f"{one.tag}: {one.why}" for one in newer)
    logger.warning(
        "takes checkpoint %s, of step %d, and none that is newer (%s)",
        candidate.tag, candidate.step, listed,
    )  # fmt: skip
