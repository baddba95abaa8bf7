"""Which checkpoints of a cluster are complete, and which of them are the same in all clusters.

A tag is written as `<tag>.unfinished` and renamed once every rank's files are on disk and rank 0
has written `dsx.json`: a process that is killed at any moment leaves the last complete tag as it
was. A tag that is written again keeps what it held (written_again.py), since another cluster may
not have got as far; both hold the inner step and the run's name, by which clusters find the same.
What they save when they are told to end is the same at whatever steps they do.

A run may resume with another number of clusters: those that are new take cluster 0's tag.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsx.checkpoint.checksums import (
    DAMAGED,
    MANIFEST,
    REMOVED,
    REPLACED,
    UNFINISHED,
    name_of,
    read_manifest,
    sealed,
    take_checksums,
)
from dsx.checkpoint.leftovers import begin_writing, end_writing

Manifests = Mapping[str, Mapping[str, Any]]  # by tag
Offer = tuple[str, Mapping[str, Any]]  # a tag and its manifest


class NotSaved(OSError):
    """A checkpoint that none of the cluster's ranks has saved; the run has been told of it."""


@dataclass(frozen=True)
class Manifest:
    """What `dsx.json` holds; `session` is the name of the run that all its clusters share."""

    format: int
    step: int
    session: str
    num_clusters: int
    num_ranks: int
    is_finished: bool = False  # whether the weights are the finished model's
    trouble: str = ""  # why a run should not go on from it: what is not finite, what is refused
    is_preempted: bool = False  # whether the run was told to end: each cluster at a step of its own
    is_doubtful: bool = False  # whether the last losses were beyond a bound, too few to tell yet
    members: tuple[int, ...] = ()  # the clusters that trained on, where others had been lost
    has_left: bool = False  # whether this cluster left, and the others trained on from there


def cluster_directory(base: str | Path, cluster_id: int) -> Path:
    """Return the directory of one cluster's checkpoints."""
    return Path(base) / f"cluster_{cluster_id}"


def begin_tag(directory: Path, tag: str) -> str:
    """Return the tag to write to until it is complete; call on one rank, before all write."""
    shutil.rmtree(directory / f"{tag}{UNFINISHED}", ignore_errors=True)
    begin_writing(directory)
    return f"{tag}{UNFINISHED}"


def complete_tag(directory: Path, tag: str, manifest: Manifest) -> None:
    """Declare a tag complete; call on one rank after all have written to `begin_tag`'s."""
    unfinished, final = directory / f"{tag}{UNFINISHED}", directory / tag
    for path in unfinished.rglob("*"):
        if path.is_file():
            sync_to_disk(path)
    write_durably(unfinished / MANIFEST, json.dumps(take_checksums(unfinished, asdict(manifest))))
    if final.exists():
        replaced = directory / f"{tag}{REPLACED}"
        (replaced / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    unfinished.rename(final)
    sync_to_disk(directory)
    end_writing(directory)


def note_left(tag: Path) -> None:
    """Say in a tag's manifest that the others have gone on: it is no part of what they save."""
    path = tag / MANIFEST
    if path.is_file():
        write_durably(path, json.dumps(sealed({**json.loads(path.read_text()), "has_left": True})))


def write_durably(path: Path, text: str) -> None:
    """Write a small file as a whole or not at all."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        unfinished.write_text(text)
        sync_to_disk(unfinished)
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    sync_to_disk(path.parent)


def sync_to_disk(path: Path) -> None:
    """Return once a file's content, or a directory's entries, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def complete_tags(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the manifests of what is complete below a cluster's directory, by tag.

    `DAMAGED` takes the place of one that cannot be trusted; see `require_readable`.
    """
    found: dict[str, dict[str, Any]] = {}
    for manifest in directory.glob(f"*/{MANIFEST}") if directory.is_dir() else ():
        if not manifest.parent.name.endswith((UNFINISHED, REMOVED)):
            found[manifest.parent.name] = read_manifest(manifest)
    return found


def newest_of_own(base: str | Path, cluster_id: int, wanted: str | None = None) -> Path | None:
    """Return the newest complete tag of a cluster, or the one that is wanted; None if not there."""
    directory = cluster_directory(base, cluster_id)
    steps = {
        tag: manifest["step"] for tag, manifest in complete_tags(directory).items()
        if DAMAGED not in manifest and wanted in (None, tag)
    }  # fmt: skip
    return directory / max(steps, key=lambda tag: steps[tag]) if steps else None


def tags_within_reach(base: str | Path, cluster_id: int) -> list[dict[str, Any]]:
    """Return what a cluster finds complete: its own tags, and those of others that it lacks.

    The latter by cluster, as text; of what several hold, the first one's.
    """
    own = complete_tags(cluster_directory(base, cluster_id))
    held = {_content(manifest) for manifest in own.values()}
    others: dict[str, dict[str, Any]] = {}
    for other in sorted(_clusters_below(Path(base)) - {cluster_id}):
        tags = complete_tags(cluster_directory(base, other))
        lacking = {tag: m for tag, m in tags.items() if DAMAGED in m or _content(m) not in held}
        held |= {_content(manifest) for manifest in lacking.values()}
        if lacking:
            others[str(other)] = lacking
    return [own, others]


def _clusters_below(base: Path) -> set[int]:
    names = [path.name.removeprefix("cluster_") for path in base.glob("cluster_*")]
    return {int(name) for name in names if name.isdecimal()}


def tags_of(reach: Sequence[Mapping[str, Any]], own: int, source: int) -> Manifests:
    """Return a cluster's tags as another one, `own`, finds them; see `tags_within_reach`."""
    return reach[0] if source == own else reach[1].get(str(source), {})


def offered(found: Sequence[Sequence[Mapping[str, Any]]]) -> list[Offer]:
    """Return what may be loaded: what cluster 0 has, and what the others have saved without it.

    Cluster 0 may hold another state of the same name, which it has saved since it is back.
    """
    offers: list[Offer] = [*found[0][0].items()]
    others = {
        (tag, _content(manifest)): (tag, manifest)
        for own, _ in reversed(found[1:])
        for tag, manifest in own.items()
        if 0 not in (manifest.get("members") or [0])
    }
    return offers + [*others.values()]


def common_tag(
    found: Sequence[Sequence[Mapping[str, Any]]], base: str | Path, wanted: str
) -> list[tuple[int, str]]:
    """Return `(source cluster, its tag)` per cluster for the tag that is `wanted`.

    `found` is `tags_within_reach` of every cluster. FileNotFoundError lists what each holds, or
    names the directory it misses; ValueError names a manifest that is damaged.
    """
    for own, others in found:
        for tags in (own, *others.values()):
            require_readable(tags, wanted)
    missing = ""
    for tag, manifest in newest_first(offered(found), wanted):
        sources, lacking = sources_of(found, base, tag, manifest)
        if sources is not None:
            return sources
        missing = f"; {lacking}"
    raise FileNotFoundError(
        f"no complete checkpoint {wanted!r} that all clusters hold under {base} from one run "
        f"({held_by(found)}){missing}"
    )


def held_by(found: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Say which tags each cluster holds."""
    return "; ".join(f"cluster {m}: {sorted(own) or 'none'}" for m, (own, _) in enumerate(found))


def sources_of(
    found: Sequence[Sequence[Mapping[str, Any]]],
    base: str | Path,
    tag: str,
    manifest: Mapping[str, Any],
) -> tuple[list[tuple[int, str]] | None, str]:
    """Return `(source cluster, its tag)` per cluster for a tag of cluster 0's, or who lacks it.

    All clusters that trained when it was written must hold it from that same run, as far as they
    take part now; a cluster that it did not have, or had lost, takes the first one's.
    """
    count = manifest.get("num_clusters", len(found))
    members = list(manifest.get("members") or range(count))
    sources: list[tuple[int, str]] = []
    for cluster, reach in enumerate(found):
        if cluster in members:
            same = same_content(reach[0], tag, manifest)
            if same is None:
                return None, f"cluster {cluster} does not hold it complete from the same run"
            sources.append((cluster, same))
            continue
        held = {m: same_content(tags_of(reach, cluster, m), tag, manifest) for m in members}
        source = next((m for m, same in held.items() if same is not None), None)
        if source is None:
            how = f"is new to that run of {count}" if cluster >= count else "had left that run"
            return None, (
                f"cluster {cluster} {how} and takes cluster {members[0]}'s "
                f"state: it looked for {cluster_directory(base, members[0]) / tag}, which is not "
                "complete there (is the directory on a file system that it shares?)"
            )
        sources.append((source, str(held[source])))
    return sources, ""


def require_readable(manifests: Manifests, wanted: str) -> None:
    """Raise ValueError if the manifest of the wanted tag is damaged."""
    for tag, manifest in manifests.items():
        if DAMAGED in manifest and wanted == tag:
            raise ValueError(
                f"{manifest[DAMAGED]}; name the checkpoint to load (tag=...), an earlier one, or "
                "delete the folder"
            )


def newest_first(offers: Iterable[Offer], wanted: str | None) -> list[Offer]:
    """Return tags and their manifests, those of most steps first; `wanted` alone, if it is given.

    Of one step those of the finished model first.
    What a tag held before it was written again counts as that tag.
    """
    fitting = [e for e in offers if wanted in (None, e[0], name_of(e[0])) and DAMAGED not in e[1]]
    return sorted(
        fitting,
        key=lambda e: (-e[1]["step"], not e[1].get("is_finished"), e[0].endswith(REPLACED)),
    )


def same_content(manifests: Manifests, tag: str, wanted: Mapping[str, Any]) -> str | None:
    """Return the tag of the same step and run, if there is one; by preference `tag` itself.

    And of the same side of `finish()`, which may have been called between two saves of a step.
    """
    names = [name for name, other in manifests.items() if _content(other) == _content(wanted)]
    return tag if tag in names else min(names, default=None)


def has_same_content(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two manifests are of the same step and run, and the same side of `finish()`."""
    return _content(one) == _content(other)


def _content(manifest: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what is equal in all clusters; a session ends with being told to end, once.

    What a cluster has saved in leaving is its own: the others have none of that step.
    """
    if manifest.get("has_left"):
        return "left", manifest.get("step"), manifest.get("session")
    step = None if manifest.get("is_preempted") else manifest.get("step")
    return step, manifest.get("session"), manifest.get("is_finished", False)
