"""Which round a channel is at, as a checkpoint says, and what it was before the last that came."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsx.checkpoint.files import SavedRank
from dsx.checkpoint.warm_starts import read_slot
from dsx.core.types import History
from dsx.outer.channel import FragmentChannel
from dsx.outer.loop import OuterLoop
from dsx.outer.transfer import NothingYet, Transfer

LAST = "last"  # what names the transfer applied last, where others have their number


def restore_rounds(
    loop: OuterLoop,
    history: History,
    in_flight: Sequence[Transfer | NothingYet],
    file: SavedRank | None = None,
    last: Sequence[Transfer] = (),
) -> None:
    """Tell channels which round's state of before theirs is, and, from a file, that of before."""
    arrived = {
        (t.fragment, t.attempt.round): t
        for t in (*in_flight, *last)
        if isinstance(t, Transfer) and t.pending.has_arrived
    }
    for fragment in loop.adapter.fragments:
        lacking = [
            t.attempt.round
            for t in in_flight
            if isinstance(t, Transfer) and t.fragment == fragment.id and not t.pending.has_arrived
        ]
        channel = loop.state.channels[fragment.id]
        earlier: dict[str, Tensor] | None = None
        next_round = min(lacking, default=history.launches[fragment.id] + 1)
        is_settled, probes = False, dict[str, Tensor]()
        if file is not None:
            probes = _probes_in(file, fragment.id, channel)
        if file is not None and f"before.parity_check.memory/{fragment.id}" in file:
            kept = {**channel.before.slots, "parity_check.memory": channel.parity_check.memory}
            earlier = {
                name: read_slot(file, f"before.{name}/{fragment.id}", tensor)
                for name, tensor in kept.items()
            }
            is_settled = _settled(loop, arrived[fragment.id, next_round - 1], file, probes)
        loop.guard.begin_anew(fragment.id, _sample(fragment.id, history, file))
        channel.restored(next_round, earlier, is_settled, probes)


def _probes_in(file: SavedRank, fragment: int, channel: FragmentChannel) -> dict[str, Tensor]:
    named = {name: f"probes.{name}/{fragment}" for name in channel.probes}
    return {name: file.read(saved) for name, saved in named.items() if saved in file}


def _settled(
    loop: OuterLoop, transfer: Transfer, file: SavedRank, probes: dict[str, Tensor]
) -> bool:
    """Return whether what a transfer sent has taken in what was lost before it.

    In a checkpoint of before dsx did so, that is beside it: it is taken in now, and `probes`, in
    place, are of before that.
    """
    fragment, attempt = transfer.fragment, transfer.attempt
    channel = loop.state.channels[fragment]
    slots = channel.before.settled
    named = {name: f"before.{name}/{fragment}" for name in slots}
    if not all(saved in file for saved in named.values()):
        entries = (*file.meta["in_flight"], *file.meta[LAST])
        own = (e for e in entries if not e["is_empty"] and e["number"] == attempt.what.number)
        return next(own).get("is_settled", False)
    now = {name: slot.clone() for name, slot in slots.items()}
    for name, slot in slots.items():
        slot.copy_(file.read(named[name]))
    is_coded = any(not torch.equal(slots[name], tensor) for name, tensor in now.items())
    if is_coded:  # else it was refused, and what was lost is still to be sent
        channel.restored(attempt.round)  # nothing has been seen of it
        channel.codec.take_in(transfer.buffers.sent, attempt.launch)
        probes |= {name: tensor.clone() for name, tensor in channel.probes.items()}
    for name, slot in slots.items():
        slot.copy_(now[name])
    return is_coded


def _sample(fragment: int, history: History, file: SavedRank | None) -> Tensor | None:
    """Return the guard's sample of the mean before; None if the checkpoint says nothing of it.

    That of a rank whose shard is empty has nothing, and is not in its file.
    """
    name = f"guard.last/{fragment}"
    if file is None or (name not in file and not history.guard):
        return None
    return file.read(name) if name in file else torch.empty(0)
