"""Which parts of a folder are of one `save_state()`: Accelerate's own, and each engine's.

They get their names one after the other, beside training some time apart. A process that is killed
in between leaves a new part beside old ones, and the old one of that part as `.replaced`: then the
old state is the one that is whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsx.checkpoint.checksums import DAMAGED, HELD, REPLACED, name_of
from dsx.checkpoint.tags import cluster_directory, complete_tags
from dsx.checkpoint.written_again import put_back
from dsx.comm.world import World
from dsx.training.handle import Handle

TAG = "accelerate"
OF_ENGINE = "pytorch_model"  # as Accelerate names what engines save; a second one's ends with _1
Tags = Mapping[str, Mapping[str, Any]]
State = tuple[int, str, list[str]]  # a step, a run, and the tags of its parts, Accelerate's first
logger = logging.getLogger(__name__)


def complete_in(folder: Path, world: World) -> dict[str, dict[str, Any]]:
    """Return the manifests of this cluster's complete tags in a folder."""
    return complete_tags(cluster_directory(folder, world.cluster_id))


def whole_states(tags: Tags, num_engines: int) -> list[State]:
    """Return the states of which a folder has all parts, the newest first."""
    of_parts: list[dict[tuple[int, str], str]] = []
    for part in _parts(num_engines):
        held = [
            (tag, tags[tag]) for tag in (f"{part}{HELD}", f"{part}{REPLACED}", part) if tag in tags
        ]
        of_parts.append({(m["step"], m.get("session", "")): tag for tag, m in held if "step" in m})
    common = {*of_parts[0]}.intersection(*of_parts[1:])
    newest = sorted(common, key=lambda key: (key[0], of_parts[0][key] == TAG), reverse=True)
    return [(*key, [of_part[key] for of_part in of_parts]) for key in newest]


def common_states(everyone: Iterable[Iterable[State]]) -> list[tuple[int, str]]:
    """Return step and run of what all clusters hold of a folder, in the first one's order."""
    first, *others = [[(step, run) for step, run, _ in states] for states in everyone]
    return [one for one in first if all(one in held for held in others)]


def parts_to_load(
    handle: Handle, world: World, folder: Path, num_engines: int
) -> dict[str, str] | None:
    """Return by part which tag of the first cluster is loaded; in others the same has its own name.

    That is the newest state that is whole in all clusters. None if there is none, or what is newest
    is damaged: what is wrong is told as it is loaded. Collective over all clusters.
    """
    tags, parts = complete_in(folder, world), _parts(num_engines)
    is_damaged = any(DAMAGED in tags.get(part, {}) for part in parts)
    own = [] if is_damaged else whole_states(tags, num_engines)
    everyone: list[Sequence[State]] = handle.gather(own)
    common = common_states(everyone)
    for step, run, names in everyone[0]:
        if (step, run) in common:
            newest = tags[TAG].get("step", step) if TAG in tags else step
            if newest != step and world.rank == 0:
                logger.warning(
                    "%s: the state of step %d is not whole there, in this cluster or another, and "
                    "that of step %d, which it was to replace, is loaded", folder, newest, step,
                )  # fmt: skip
            return dict(zip(parts, names, strict=True))
    return None


def put_back_whole(folder: Path, world: World, num_engines: int) -> None:
    """Put back a part that has been written without its others, before it is written again.

    Else that would delete the state that is whole. The first rank does it; OSError.
    """
    if world.rank != 0:
        return
    for _, _, tags in whole_states(complete_in(folder, world), num_engines)[:1]:
        for tag in tags:
            if tag.endswith(REPLACED):
                directory = cluster_directory(folder, world.cluster_id)
                put_back(directory, name_of(tag), tag)


def _parts(num_engines: int) -> list[str]:
    return [TAG, *(f"{OF_ENGINE}_{i}" if i else OF_ENGINE for i in range(num_engines))]
