"""The outer state beside Megatron's checkpoint of the same iteration.

`save_outer_state` writes `<directory>/dsx/cluster_<m>/iter_<iteration>/`, under whatever directory
Megatron saves to: a file per rank, transfers in flight included, complete or not there at all
(tags.py). Called before Megatron's own save, and not writing beside training, it is complete
whenever Megatron's `latest_checkpointed_iteration.txt` names the iteration.

`load_outer_state` refuses with an error, in all clusters, what is missing, of another iteration or
run, and weights that are not those which were saved with it: `masters.json` holds the sum of the
bits of every fragment's masters, which is the same however they are sharded. `dsx_megatron.json`
says how the ranks' slices make one model (megatron_model), for `dsx export`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dsx.checkpoint.files import SavedCluster
from dsx.checkpoint.health import tensors_of
from dsx.checkpoint.tags import (
    cluster_directory,
    common_tag,
    complete_tag,
    tags_within_reach,
    write_durably,
)
from dsx.comm.world import World, current_world
from dsx.engines.agreed_save import AgreedSave, survives
from dsx.engines.cluster_collectives import gather_objects
from dsx.engines.copies import bit_sum
from dsx.engines.megatron.own_part import MegatronPart, note_not_ended, tag_of
from dsx.engines.megatron_model.notes import NOTES
from dsx.training.handle import Handle
from dsx.training.manifest import manifest_of

MASTERS = "masters.json"
Sums = dict[str, list[int]]  # by pipeline stage, one per fragment


def save_outer_state(handle: Handle, iteration: int, directory: str | Path) -> bool:
    """Save the outer state of an iteration; every rank calls it, before Megatron saves its part.

    Returns whether it is saved: where it cannot be written, a line says so, and the run goes on.
    With `checkpoints.beside_training` it may be written while training goes on; until it is
    complete a resume takes the iteration before (`newest_iteration` of resume.py).
    Both inside `with handle.saving():`, so that after `finish()` Megatron's part is the finished
    model; a cluster that loads it has its own masters back.
    """
    return survives(lambda: _save(handle, iteration, directory))


def _save(handle: Handle, iteration: int, directory: str | Path) -> None:
    world = _world()
    base = cluster_directory(_outer(directory), world.cluster_id)
    tag = tag_of(iteration)
    sums = _sum_masters(handle)
    saving = AgreedSave(handle, base, tag, world.rank == 0, may_be_later=True)
    with saving.part():
        handle.write(saving.unfinished)
    saving.agree()
    adapter: Any = handle.loop.adapter
    notes = adapter.note_taker.take()
    judged = gather_objects(handle.rollback.judge(tensors_of(adapter.inner_optimizers)))
    manifest = manifest_of(handle, world, judged)

    def finish() -> None:
        write_durably(saving.unfinished / MASTERS, json.dumps(sums))
        write_durably(saving.unfinished / NOTES, notes.as_json())
        complete_tag(base, tag, manifest)

    saving.complete(finish)


def load_outer_state(handle: Handle, iteration: int, directory: str | Path) -> None:
    """Load the outer state of the iteration that Megatron has loaded; every rank calls it.

    Collective over all clusters. FileNotFoundError if a cluster has no complete state of that
    iteration, ValueError if it is another run's, or not of the weights now in the model. A cluster
    that joins loads nothing, alone, and will take from the others only what it lacks there.
    """
    if handle.joining.is_due:
        look_for_own(handle, directory)
        return
    world = _world()
    iterations = handle.gather(iteration)
    base = _outer(directory)
    found = handle.gather(tags_within_reach(base, world.cluster_id))
    try:
        sources = common_tag(found, base, tag_of(iterations[0]))
    except FileNotFoundError as error:
        sources = []
        if len(set(iterations)) == 1:
            raise FileNotFoundError(
                f"{error}; to begin outer training from weights of Megatron alone, leave resume "
                "out (with Megatron-LM's own loading: --finetune)"
            ) from None
    if [tag for _, tag in sources] != [tag_of(i) for i in iterations] and len(set(iterations)) > 1:
        loaded = ", ".join(f"cluster {m}: {i}" for m, i in enumerate(iterations))
        raise ValueError(
            f"the clusters have loaded different iterations ({loaded}), and have not saved them "
            "as they were told to end; load the last one that all of them hold (--ckpt-step)"
        )
    source, tag = sources[world.cluster_id]
    path = cluster_directory(base, source) / tag
    saved = _open(handle, path)
    handle.load(
        path,
        is_new=source != world.cluster_id,
        is_other_number=saved.num_clusters != world.num_clusters,
    )


def follow_own_part(handle: Handle, directory: str | Path | None) -> None:
    """Note what Megatron has begun and not ended where it saves to, before it saves there again.

    With a remote place that is what is copied to it, too.
    """
    if directory is None:
        return
    if _world().rank == 0:
        note_not_ended(Path(directory))
    if handle.remote is not None:
        handle.remote.part = MegatronPart(directory)


def look_for_own(handle: Handle, directory: str | Path) -> None:
    """Let a cluster that joins take from the others only what its own checkpoints there lack."""
    handle.joining.look_in(_outer(directory))


def _world() -> World:
    world = current_world()
    if world is None:
        raise RuntimeError("dsx.init_distributed has not been called in this process")
    return world


def _outer(directory: str | Path) -> Path:
    return Path(directory) / "dsx"


def _open(handle: Handle, path: Path) -> SavedCluster:
    """Return the files; ValueError, in every cluster, if one has not all or has other weights."""
    sums, saved, trouble = _sum_masters(handle), None, None
    try:
        saved = SavedCluster(path)
        masters = json.loads((path / MASTERS).read_text())
    except (OSError, ValueError) as error:
        trouble = f"{error}"
    else:
        stages = [stage for stage in sums if sums[stage] != masters.get(stage)]
        if stages:
            trouble = (
                f"the masters that Megatron has loaded on pipeline stage(s) {', '.join(stages)} "
                f"are not those that {path} was saved with: load the checkpoint of the same run "
                "and iteration, with its optimizer (no --no-load-optim, no --finetune)"
            )
    for cluster, text in enumerate(handle.gather(trouble)):
        if text:
            raise ValueError(f"cluster {cluster}: {text}")
    assert saved is not None
    return saved


def _sum_masters(handle: Handle) -> Sums:
    """Return the sum of the masters' bits, by stage and fragment. Collective in the cluster."""
    adapter = handle.loop.adapter
    own: list[int] = []
    for fragment in adapter.fragments:
        values = torch.empty(fragment.numel, device=adapter.device)
        adapter.read(fragment.id, values)
        own.append(bit_sum(values))
    sums: Sums = {}
    for stage, rank_sums in sorted(gather_objects((str(adapter.stage.index), own))):
        before = sums.get(stage, [0] * len(rank_sums))
        sums[stage] = [(a + b) % (1 << 64) for a, b in zip(before, rank_sums, strict=True)]
    return sums
