"""A Trainer's checkpoints: which one all clusters have.

Each cluster keeps `checkpoint-<step>` folders of its own. One that was killed while saving has one
less than the others, and what clusters save when they are told to end is of a step of each one's
own. So the clusters compare what they hold, by what dsx has written into it, and take the newest
that is the same in all of them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsx.checkpoint.tags import cluster_directory, complete_tags
from dsx.comm.world import World
from dsx.run.hugging_face.synchronous import identity, is_plain

_FOLDER = re.compile(r"checkpoint-(\d+)")
_STATE = "trainer_state.json"
_NUM_CLUSTERS = 2  # its place in the contents of a checkpoint
logger = logging.getLogger(__name__)


def common_checkpoint(output_dir: str, asked: str | bool | None, world: World) -> Path | None:
    """Return the folder that this cluster resumes from: of a checkpoint that all clusters have.

    `asked` is what the script resumes from: a folder, later than which nothing is taken, True (or
    that word, from a parser of arguments) for the newest, or None. Where none of the clusters
    resumes, there is none: one that has nothing does with the others. A folder of a Trainer without
    dsx, or where no cluster has any of dsx the newest of these, is one that this run begins from
    (`is_plain`). Collective over all ranks of all clusters; ValueError if there is none that all
    have, or another number of clusters has saved it, for which the data was cut.
    """
    own = Path(output_dir)
    wanted = None if asked is None or str(asked).lower() == "true" else str(asked)
    plain = _newest_plain(own.parent) if wanted is None else Path(wanted)
    plain = plain if plain is not None and is_plain(plain) else None
    if wanted is not None:
        own = _own_folder(Path(wanted), world)
    last = None if wanted is None else own.name
    base = own if wanted is None else own.parent
    its_identity = None if plain is None else identity(plain)
    is_named = plain is not None and wanted is not None
    told = world.rendezvous.gather(
        "checkpoints of the Trainer",
        [asked is not None, last, _contents(base, world), its_identity, is_named],
    )
    if not any(is_asked for is_asked, *_ in told):
        return None
    found = [(of, contents) for _, of, contents, *_ in told]
    any_named = any(named for *_, named in told)
    chosen = None if any_named else choose_common(found)
    if chosen is None:
        begins = any_named or not any(contents for _, contents in found)
        _require_same_plain(base, found, [of_plain if begins else None for *_, of_plain, _ in told])
        return plain
    name = chosen[world.cluster_id]
    saved = found[world.cluster_id][1][name][_NUM_CLUSTERS]
    if saved != world.num_clusters:
        raise ValueError(
            f"{base / name} is of a run of {saved} clusters, and its data was cut for as many: "
            f"some of it would be read twice by {world.num_clusters}, and some never; start as "
            "many clusters, or train on from what save_model has written"
        )
    if last not in (None, name) and world.rank == 0:
        logger.warning("%s is not complete in all clusters: they go on from %s", own, base / name)
    return base / name


def _newest_plain(base: Path) -> Path | None:
    """Return the newest checkpoint of a run without dsx in the folder of all clusters."""
    folders = [f for f in base.glob("checkpoint-*") if _FOLDER.fullmatch(f.name) and is_plain(f)]
    return max(folders, key=lambda folder: _step(folder.name), default=None)


def _require_same_plain(base: Path, found: Sequence[Any], plain: Sequence[Any]) -> None:
    """Raise ValueError unless all clusters have the same checkpoint of a run without dsx."""
    if all(one is not None and one == plain[0] for one in plain):
        return
    if any(one is not None for one in plain):
        have = "; ".join(f"cluster {m}: {one[0] if one else 'none'}" for m, one in enumerate(plain))
        raise ValueError(
            f"the clusters do not find one checkpoint of a Trainer without dsx ({have}): give "
            "every site a copy of the same files, and name it (resume_from_checkpoint=PATH)"
        )
    have = "; ".join(f"cluster {m}: {', '.join(c) or 'none'}" for m, (_, c) in enumerate(found))
    raise ValueError(
        f"no checkpoint in {base} is complete in all clusters ({have}), and none of a Trainer "
        "without dsx, with its optimizer, is named: copy one that is complete to all of them, or "
        "name the plain one (resume_from_checkpoint=PATH), or start without resume_from_checkpoint,"
        " from the weights (model_name_or_path)"
    )


def choose_common(
    found: Sequence[tuple[str | None, Mapping[str, Sequence[Any]]]],
) -> list[str] | None:
    """Return the name of each cluster's newest checkpoint that all have; None if there is none.

    By cluster: the name that was asked for, and what is in each of its checkpoints, which is equal
    for the same one.
    """
    steps = [_step(last) for last, _ in found if last is not None]
    newest_first = sorted(found[0][1], key=_step, reverse=True)
    for name in newest_first:
        if steps and _step(name) > max(steps):
            continue
        same = [_same(contents, found[0][1][name]) for _, contents in found]
        if all(one is not None for one in same):
            return [one for one in same if one is not None]
    return None


def _same(contents: Mapping[str, Sequence[Any]], wanted: Sequence[Any]) -> str | None:
    names = [name for name, content in contents.items() if list(content) == list(wanted)]
    return max(names, key=_step, default=None)


def _step(name: str) -> int:
    found = _FOLDER.fullmatch(name)
    return int(found[1]) if found else -1


def _own_folder(wanted: Path, world: World) -> Path:
    """Return this cluster's folder of a checkpoint, where the script has named that of the run."""
    own = cluster_directory(wanted.parent, world.cluster_id)
    return own / wanted.name if wanted.parent.name != own.name and own.is_dir() else wanted


def _contents(base: Path, world: World) -> dict[str, list[Any]]:
    """Return what identifies each complete checkpoint: its step and run, and their clusters.

    Without a step where it was cut short, as each cluster is at one of its own then.
    """
    contents: dict[str, list[Any]] = {}
    for folder in base.glob("checkpoint-*"):
        if _FOLDER.fullmatch(folder.name) and (folder / _STATE).is_file():
            tags = complete_tags(cluster_directory(folder, world.cluster_id))
            for tag in tags.values():
                step = None if tag.get("is_preempted") else tag["step"]
                contents[folder.name] = [step, tag["session"], tag["num_clusters"]]
    return contents
