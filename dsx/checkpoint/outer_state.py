"""Outer state on disk: one safetensors file per rank, transfers in flight included.

A save waits for no other cluster: of a transfer in flight its mean is stored, if it has come, else
what another attempt is made from (transfers.py). A run that loads it hands over or makes again what
is missing (outer/resuming.py) and applies each at its own due step, so it equals one that was never
stopped. So does one that was stopped in the midst of a boundary, whose rest then comes first.

The layout travels with the buffers. Where it is the run's own, and so is the number of clusters,
each rank takes its file back, bit for bit; else what a rank needs is put together from the files of
all ranks (reshard.py). Another model, fragmentation or kind of method is refused by name.

Where the engine's own files hold the averaged model, as after `finish()`, the cluster's own masters
are in these, and go back into the engine on load.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsx.checkpoint.checksums import of_text, require_intact
from dsx.checkpoint.files import (
    FORMAT,
    META_CHECKSUM,
    SavedCluster,
    SavedRank,
    differences,
    first_difference,
    rank_file,
)
from dsx.checkpoint.of_rank import errors, kinds, layouts, state_shape
from dsx.checkpoint.pipeline_repartition import require_nothing_in_flight
from dsx.checkpoint.reshard import Resharding
from dsx.checkpoint.snapshot import Snapshot
from dsx.checkpoint.transfers import Restored, restore_all, take_stock
from dsx.checkpoint.warm_starts import read_slot
from dsx.comm.topology import RankInfo
from dsx.core.types import Fragment
from dsx.outer.loop import OuterLoop
from dsx.outer.resuming import Unresumed
from dsx.outer.transfer import Transfer

logger = logging.getLogger(__name__)
_OF_OLDER_FILES = {"outer_optimizer.state_dtype": "fp32"}  # settings that they do not name yet
_ADVICE = "resume with the method it was saved with, or start a new run from the model's weights"


def take_snapshot(
    loop: OuterLoop,
    directory: Path,
    rank_info: RankInfo,
    session: str,
    axes: Mapping[str, Any],
    tracked: Mapping[str, Any],
    own_masters: Sequence[Tensor] | None = None,
    keeps_last: bool = False,
) -> Snapshot:
    """Return one rank's outer state as it is now, to be written by `write`; where training goes on
    before that, by `detach` first. It waits for no other cluster.

    `session` names the run. The masters are in it, too, where their mean is to be exported, and
    where the engine holds the average: then they are `own_masters`. `keeps_last`: clusters may save
    at different steps, so what was applied last may be lacking elsewhere. Collective over the ranks
    of a stage.
    """
    with take_stock(loop) as stock:
        tensors = _masters(loop, own_masters)
        for fragment in loop.adapter.fragments:
            for name, tensor in stock.state(fragment.id).items():
                tensors[f"{name}/{fragment.id}"] = tensor
        meta = {
            "format": FORMAT,
            "rank_info": asdict(rank_info) | {"num_clusters": len(ids := loop.transport.seat.ids)},
            "members": [*ids],
            "session": session,
            "step": loop.history.step,
            "engine_holds": "local" if own_masters is None else "average",
            "history": loop.history.state_dict(),
            **stock.describe(tensors, keeps_last),
            "left_at": loop.deferral.inner_lr,
            "is_of_own_step": keeps_last,
            **layouts(loop),
            "encodes_at_launch": loop.method.encodes_at_launch,
            "codec_errors": [errors(loop, fragment) for fragment in loop.adapter.fragments],
            "state": state_shape(loop),
            "kinds": kinds(loop),
            "axes": axes,
            "tracked": tracked,
            "totals": asdict(loop.totals),
        }
    text = json.dumps(meta)
    stays = {
        f"{name}/{fragment.id}": fragment.id
        for fragment in loop.adapter.fragments
        for name in ("anchor", *(f"outer.{n}" for n in loop.state.slots[fragment.id].outer))
    }
    return Snapshot(
        rank_file(directory, rank_info.rank),
        tensors,
        {"dsx": text, META_CHECKSUM: of_text(text)},
        stays,
        tells=rank_info.rank == 0,
    )


def _masters(loop: OuterLoop, own_masters: Sequence[Tensor] | None) -> dict[str, Tensor]:
    """Return the cluster's masters, where a checkpoint needs them beside the engine's."""
    if own_masters is not None:
        return {f"local/{fragment}": masters for fragment, masters in enumerate(own_masters)}
    if loop.method.delay.export != "mean":
        return {}
    found: dict[str, Tensor] = {}
    for fragment in loop.adapter.fragments:
        found[f"local/{fragment.id}"] = torch.empty(fragment.numel, device=loop.adapter.device)
        loop.adapter.read(fragment.id, found[f"local/{fragment.id}"])
    return found


def load_state(
    loop: OuterLoop,
    directory: Path,
    rank_info: RankInfo,
    axes: Mapping[str, Any],
    is_repartitioned: bool = False,
    allows_unequal_steps: bool = False,
) -> Mapping[str, Any]:
    """Restore one rank's outer state from a cluster's tag and return the tracked states.

    Collective over the ranks of the cluster. FileNotFoundError if a rank's file is missing,
    ValueError if one is of another run, model or method. `place.num_clusters` may differ from the
    number of clusters that saved; a cluster that is new gives another one's directory.
    `is_repartitioned`: the same parameters lie on other pipeline stages, the same on every rank.
    All clusters load: `loop.settle` waits for them, at the next boundary at the latest; one that
    was left when this was saved is ended by `loop.end_boundary`, which has to be called then.
    """
    saved, own = _find(loop, directory, rank_info, axes, is_repartitioned)
    for transfer in loop.in_flight:
        if isinstance(transfer, Transfer) and not isinstance(transfer.pending, Unresumed):
            transfer.pending.wait()  # its thread still writes to the buffers that are restored
    loop.state.free_buffers()
    if own is None:
        resharding = Resharding(loop, saved, rank_info, is_repartitioned)
        restored, read_masters = resharding.restore(), resharding.masters
    else:
        restored, read_masters = _restore_own(loop, own), _masters_in(own)
    loop.restore(
        restored.history,
        restored.in_flight,
        restored.last,
        restored.left_at,
        allows_unequal_steps or saved.reference(rank_info.rank).meta["is_of_own_step"],
    )
    loop.totals = restored.totals
    if saved.has_average:
        _give_back_masters(loop, read_masters)
    return restored.tracked


def _restore_own(loop: OuterLoop, own: SavedRank) -> Restored:
    """Take this rank's own file back, bit for bit."""
    for fragment in loop.adapter.fragments:
        for name, tensor in loop.state.named_state(fragment.id).items():
            if tensor.numel():
                tensor.copy_(read_slot(own, f"{name}/{fragment.id}", tensor))
    return restore_all(loop, own)


def _masters_in(own: SavedRank) -> Callable[[Fragment], Tensor]:
    def read(fragment: Fragment) -> Tensor:
        return own.read(f"local/{fragment.id}") if fragment.numel else torch.empty(0)

    return read


@torch.no_grad()
def _give_back_masters(loop: OuterLoop, read: Callable[[Fragment], Tensor]) -> None:
    """Put the cluster's own masters in the place of the average. Collective in the cluster."""
    for fragment in loop.adapter.fragments:
        loop.adapter.write(fragment.id, read(fragment).to(loop.adapter.device))
    loop.adapter.sync_model_weights()


def _find(
    loop: OuterLoop,
    directory: Path,
    rank_info: RankInfo,
    axes: Mapping[str, Any],
    is_repartitioned: bool,
) -> tuple[SavedCluster, SavedRank | None]:
    """Return the cluster's files, and this rank's own if every rank finds its own layout in its.

    Collective: an error on one rank is an error on all, before anything has been changed.
    """
    saved, own, trouble, outcome = None, None, None, 1.0
    try:
        require_intact(directory, rank_info.rank, rank_info.world_size)
        names = {p.name for of_one in loop.adapter.fragment_parameters for p in of_one}
        saved = SavedCluster(directory, None if is_repartitioned else loop.adapter.stage, names)
        reference = saved.reference(rank_info.rank)
        if is_repartitioned:
            require_nothing_in_flight(saved)
        else:
            _require_same_model(reference, loop)
        _require_same_method(reference, axes, loop, is_repartitioned)
        if not is_repartitioned and _is_of_this_layout(loop, saved, reference, rank_info):
            _require_same_buffers(reference, loop)
            own, outcome = reference, 0.0
        _warn_of_changes(reference, axes, len(loop.adapter.fragments))
        _warn_of_uncoded_shares(reference, loop)
    except (ValueError, FileNotFoundError) as error:
        trouble, outcome = error, 2.0
    agreed = float(loop.adapter.ranks.max_over_ranks(torch.tensor([outcome])))
    if trouble is not None:
        raise trouble
    if agreed == 2 or saved is None:
        raise ValueError(f"another rank could not use its outer state in {directory}")
    return saved, own if agreed == 0 else None


def _is_of_this_layout(
    loop: OuterLoop, saved: SavedCluster, reference: SavedRank, rank_info: RankInfo
) -> bool:
    ours = (rank_info.rank, rank_info.world_size, rank_info.num_clusters)
    theirs = (reference.meta["rank_info"]["rank"], saved.num_ranks, saved.num_clusters)
    is_same = ours == theirs and saved.members == [*loop.transport.seat.ids]
    if is_same and _have_other_storage(loop, reference):
        return False  # residuals are read in fp32 then, and coded anew
    return is_same and all(reference.meta[k] == value for k, value in layouts(loop).items())


def _have_other_storage(loop: OuterLoop, reference: SavedRank) -> bool:
    """Whether this run keeps any residual in another format than it was saved in."""
    for fragment in loop.adapter.fragments:
        saved = reference.meta["codec_errors"][fragment.id]
        own = errors(loop, fragment)
        if any(n in saved and own[n]["storage"] != saved[n]["storage"] for n in own):
            return True
    return False


def _require_same_buffers(own: SavedRank, loop: OuterLoop) -> None:
    if difference := first_difference(state_shape(loop), own.meta["state"]):
        where, ours, theirs = difference
        raise ValueError(f"{own.path} holds {where}={theirs}, and this method {ours}: {_ADVICE}")


def _require_same_model(saved: SavedRank, loop: OuterLoop) -> None:
    """Refuse another model, other fragments or another pipeline stage."""
    for key in ("stage", "parameters"):
        difference = first_difference(kinds(loop)[key], saved.meta["kinds"][key], key)
        if difference:
            where, ours, theirs = difference
            raise ValueError(
                f"{saved.path} belongs to another model or fragmentation: {where} is {theirs} "
                f"there and {ours} here; resume with the same model, fragments and pipeline stages"
            )


def _require_same_method(
    saved: SavedRank, axes: Mapping[str, Any], loop: OuterLoop, is_repartitioned: bool
) -> None:
    """Refuse another type on an axis, or other buffers: what is saved would mean something else."""
    for axis, ours in axes.items():
        theirs = saved.meta["axes"].get(axis, {})
        types = [choice.get("type", choice.get("by")) for choice in (theirs, ours)]
        if types[0] != types[1]:
            raise ValueError(
                f"{saved.path} was saved with {axis} of type {types[0]!r}, and this run has "
                f"{types[1]!r}: {_ADVICE}"
            )
    steps = [a.get("delay", {}).get("steps") for a in (saved.meta["axes"], axes)]
    if steps.count("auto") == 1:  # then times travel with the transfers under way
        raise ValueError(
            f"{saved.path} was saved with delay.steps={steps[0]!r}, and this run has {steps[1]!r}: "
            f"{_ADVICE}"
        )
    ours, theirs = kinds(loop), dict(saved.meta["kinds"])
    for of_one in (ours, theirs) if is_repartitioned else ():  # what all fragments have
        of_one.update(stage=None, parameters=None, buffers=of_one["buffers"][:1])
    if difference := first_difference(ours, theirs):
        where, ours, theirs = difference
        raise ValueError(f"{saved.path} holds {where}={theirs}, and this method {ours}: {_ADVICE}")


def _warn_of_uncoded_shares(saved: SavedRank, loop: OuterLoop) -> None:
    """Tell of a run that has looked ahead by shares that were not what the wire carried."""
    if loop.method.encodes_at_launch and not saved.meta.get("encodes_at_launch", False):
        logger.warning(
            "%s is of a run whose eager overlap looked ahead by its own share as it was before "
            "coding: what coding lost of it is in the look-ahead, and fades with the momentum",
            saved.path,
        )


def _warn_of_changes(saved: SavedRank, current: Mapping[str, Any], num_fragments: int) -> None:
    """Tell of each setting that is another now; "auto" and what it comes to are the same."""
    ours, theirs = json.loads(json.dumps(current)), saved.meta["axes"]
    for where, our, their in differences(ours, theirs):
        if where == "fragments.num_fragments":
            counts = (num_fragments, len(saved.meta["kinds"]["parameters"]))
            our, their = _counted(our, counts[0]), _counted(their, counts[1])
        if their is None:
            their = _OF_OLDER_FILES.get(where)
        if our != their:
            logger.warning(
                "%s was saved with %s=%s; going on with %s", saved.path, where, their, our
            )


def _counted(num_fragments: Any, count: int) -> Any:
    return count if num_fragments in ("auto", None) else num_fragments
