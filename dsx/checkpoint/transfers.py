"""A transfer under way on disk: its mean if it has come, else what another attempt is made from.

A checkpoint waits for nobody else. Of a transfer whose mean all ranks of the cluster have, the mean
is written with what travels beside it; of any other, what this cluster sends, as it was at the
launch. The state of a fragment's channel is that of before the first one that has not come.

Where a cluster that lacks a mean could not make its channel's state from it (factors, means that
are encoded by owners), what came last goes with its own contribution and the state of before: all
then make that attempt again. So does, if `keeps_last`, the transfer that was applied last, for a
cluster that saves at another step and may lack it; without its mean, where that has made room for
the launch behind it (outer/passing_on.py).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from dsx.checkpoint.files import SavedRank
from dsx.checkpoint.rounds import LAST, restore_rounds
from dsx.compress.base import EncodingChannel, Launch
from dsx.core.transport import Submission
from dsx.core.types import History, SyncParams
from dsx.outer.arenas import TransferBuffers
from dsx.outer.attempt import Attempt
from dsx.outer.loop import OuterLoop
from dsx.outer.parity_check import ParityResult
from dsx.outer.resuming import Unresumed
from dsx.outer.saved_places import told_beside
from dsx.outer.transfer import Arrived, NothingYet, Totals, Transfer


class Stock:
    """What is under way on this rank at one moment; made by `take_stock`."""

    def __init__(self, loop: OuterLoop, arrived: list[bool]) -> None:
        self._loop = loop
        self._arrived = arrived
        self._next: dict[int, int] = {}  # by fragment, the first round that has not come
        for fragment in loop.adapter.fragments:
            rounds = [
                t.attempt.round
                for t, has_arrived in zip(loop.in_flight, arrived, strict=True)
                if isinstance(t, Transfer) and t.fragment == fragment.id and not has_arrived
            ]
            self._next[fragment.id] = min(rounds, default=loop.history.launches[fragment.id] + 1)

    def state(self, fragment: int) -> dict[str, Tensor]:
        """Return a fragment's named state, its channel's of before the first that is lacking."""
        before = self._state_before(fragment, self._next[fragment])
        assert before is not None, f"fragment {fragment}: no state before what is under way"
        channel = self._loop.state.channels[fragment]
        beside = {"guard.last": self._loop.guard.last[fragment]}
        beside |= {f"probes.{name}": tensor.clone() for name, tensor in channel.probes.items()}
        own = self._loop.state.named_state(fragment)
        return {**own, **before, **beside, **self._settled(fragment)}

    def _settled(self, fragment: int) -> dict[str, Tensor]:
        """Return what is settled, as `state` does the rest."""
        before, next_round = self._loop.state.channels[fragment].before, self._next[fragment]
        if before.is_settled(next_round):  # here, and the cluster has yet to end it
            return {name: torch.zeros_like(slot) for name, slot in before.settled.items()}
        is_under_way = self._is_under_way(fragment)
        return {n: slot.clone() if is_under_way else slot for n, slot in before.settled.items()}

    def _is_under_way(self, fragment: int) -> bool:
        """Whether an exchange of a fragment may go on, and end, while this is written."""
        return self._next[fragment] <= self._loop.history.launches[fragment]

    def _state_before(self, fragment: int, round: int) -> dict[str, Tensor] | None:
        """Return the state before a round, copied if exchanges may change it during the save."""
        channel = self._loop.state.channels[fragment]
        rounds_ahead = self._loop.history.launches[fragment] + 1 - round
        stays = rounds_ahead == 0 or (rounds_ahead == 1 and channel.before.has_coded(round))
        before = channel.before.of(round)
        if before is None or stays:
            return before
        return {name: tensor.clone() for name, tensor in before.items()}

    def describe(self, tensors: dict[str, Tensor], keeps_last: bool) -> dict[str, Any]:
        """Return what is under way as JSON values; its buffers go to `tensors`, in place."""
        loop = self._loop
        in_flight: list[dict[str, Any]] = []
        for index, transfer in enumerate(loop.in_flight):
            if isinstance(transfer, NothingYet):
                in_flight.append({"fragment": transfer.fragment, "is_empty": True})
                continue
            can_redo = self._keeps_before(transfer, tensors)
            has_arrived = self._arrived[index]
            in_flight.append(
                _describe(
                    loop, transfer, str(index), has_arrived, can_redo, tensors,
                    self._is_under_way(transfer.fragment),
                )
            )  # fmt: skip
        last: list[dict[str, Any]] = []
        for fragment, transfer in loop.last_applied.items() if keeps_last else ():
            buffers, round = transfer.buffers, transfer.attempt.round
            is_held = buffers.holds(round) or buffers.is_passed_on
            before = loop.state.channels[fragment].before
            if is_held and before.met <= round and loop.state.is_sent(fragment):
                key, can_redo = f"{LAST}.{fragment}", self._keeps_before(transfer, tensors)
                is_under_way = self._is_under_way(fragment)
                if can_redo or not buffers.is_passed_on:
                    entry = _describe(loop, transfer, key, True, can_redo, tensors, is_under_way)
                    last.append(entry)
        return {"in_flight": in_flight, LAST: last}

    def _keeps_before(self, transfer: Transfer, tensors: dict[str, Tensor]) -> bool:
        """Keep the state of before what came last, where a mean alone would not do."""
        channel, attempt = self._loop.state.channels[transfer.fragment], transfer.attempt
        if attempt.round >= self._next[transfer.fragment]:
            return True
        if transfer.buffers.held_sent is None:
            return False  # all clusters have ended it: exchanges go on
        newer = self._loop.history.launches[transfer.fragment] - attempt.round
        if self._loop.method.encodes_at_launch and newer >= self._loop.method.max_in_flight:
            return False  # a later launch has been encoded in its place
        is_enough = channel.can_recode(attempt.launch) and not transfer.buffers.is_passed_on
        if attempt.round < self._next[transfer.fragment] - 1 or is_enough:
            return False
        earlier = self._state_before(transfer.fragment, attempt.round)
        for name, tensor in (earlier or {}).items():
            if tensor.numel():  # a refused round has left the state as it was: one file, two names
                is_same = tensors.get(f"{name}/{transfer.fragment}") is tensor
                tensors[f"before.{name}/{transfer.fragment}"] = (
                    tensor.clone() if is_same else tensor
                )
        return earlier is not None


@contextmanager
def take_stock(loop: OuterLoop) -> Generator[Stock, None, None]:
    """Hold what is under way as it is, but for the network; collective over a stage's ranks.

    Waits for contributions to be on the host, and coded, and for no other cluster.
    """
    for transfer in loop.in_flight:
        if isinstance(transfer, Transfer) and loop.state.is_sent(transfer.fragment):
            transfer.attempt.is_finite()
            loop.attempts.require_coded(transfer.attempt)
    with ExitStack() as gates:
        for channel in loop.state.channels:
            gates.enter_context(channel.gate)  # first: whoever opens it anew makes another `before`
            gates.enter_context(channel.before.gate)
        own = [not isinstance(t, Transfer) or t.pending.has_arrived for t in loop.in_flight]
        arrived = own
        if own:
            lacking = torch.tensor([float(not here) for here in own])
            arrived = [not lacks for lacks in loop.adapter.ranks.max_over_ranks(lacking).tolist()]
        for index, transfer in enumerate(loop.in_flight):
            if isinstance(transfer, Transfer) and own[index] and not arrived[index]:
                before = loop.state.channels[transfer.fragment].before
                can_redo = before.of(transfer.attempt.round) is not None
                arrived[index] = not can_redo or transfer.buffers.held_sent is None  # too late
        yield Stock(loop, arrived)


def _describe(
    loop: OuterLoop,
    transfer: Transfer,
    key: str,
    has_arrived: bool,
    can_redo: bool,
    tensors: dict[str, Tensor],
    is_under_way: bool,
) -> dict[str, Any]:
    buffers, attempt = transfer.buffers, transfer.attempt
    named: dict[str, Tensor | None] = {"kept": buffers.kept, "norm": transfer.contribution_norm}
    is_sent = loop.state.is_sent(transfer.fragment)
    if has_arrived:
        mean = None if buffers.is_passed_on else transfer.pending.wait()
        named |= {"mean": mean, "sideband": buffers.sideband.values}
    if can_redo and is_sent:
        named["posted"] = buffers.posted.values
        if not buffers.is_shared:
            named["sent"] = buffers.sent.clone() if is_under_way else buffers.sent
        elif attempt.is_finite():
            codec = cast(EncodingChannel, loop.state.channels[transfer.fragment].codec)
            for name, message in codec.messages(attempt.launch).items():
                named[f"code.{name}"] = message
    for name, tensor in named.items():
        if tensor is not None and tensor.numel():
            tensors[f"in_flight.{name}/{key}"] = tensor
    return {
        "fragment": transfer.fragment,
        "is_empty": False,
        "launched": transfer.launched,
        "interval": transfer.interval,
        "was_sent_before_update": transfer.was_sent_before_update,
        "shared_by": transfer.shared_by,
        "sync_params": asdict(transfer.sync_params),
        "number": attempt.what.number,
        "round": attempt.round,
        "has_arrived": has_arrived,
        "is_passed_on": buffers.is_passed_on,
        "can_redo": can_redo,
        "is_settled": loop.state.channels[transfer.fragment].before.is_settled(attempt.round),
        "square": attempt.square,
        "is_finite": attempt.is_finite() if is_sent else True,
        "is_idle": attempt.is_idle,
        "anchor": attempt.anchor_hash(),
        "told": told_beside(transfer) if has_arrived else {},
        "place": {} if has_arrived or not attempt.place else {**attempt.place, "coming": []},
        "parity": asdict(buffers.parity) if has_arrived else None,
        "sideband": asdict(buffers.sideband.shape),
        "bytes_sent": transfer.pending.bytes_sent if has_arrived else 0,
        "seconds": transfer.pending.seconds if has_arrived else 0.0,
    }


@dataclass
class Restored:
    """What a checkpoint says beside the buffers of the state."""

    history: History
    in_flight: list[Transfer | NothingYet]
    last: list[Transfer]
    left_at: float | None  # the inner rate of a boundary that has to be ended
    totals: Totals
    tracked: Mapping[str, Any]


def restore_all(loop: OuterLoop, file: SavedRank) -> Restored:
    """Rebuild what this rank has saved itself; its channels' state has been copied."""
    meta, state = file.meta, loop.state
    history = History.from_state_dict(meta["history"])
    in_flight: list[Transfer | NothingYet] = []
    for index, entry in enumerate(meta["in_flight"]):
        if entry["is_empty"]:
            in_flight.append(NothingYet(entry["fragment"]))
        else:
            sends = entry["can_redo"] or not entry["has_arrived"]
            buffers = state.take_buffers(entry["fragment"], entry["round"], sends)
            in_flight.append(_restore(loop, entry, str(index), file, buffers))
    last = [
        _restore(
            loop,
            entry,
            f"{LAST}.{entry['fragment']}",
            file,
            state.more_buffers(entry["fragment"], entry["round"]),
        )  # fmt: skip
        for entry in meta[LAST]
    ]
    restore_rounds(loop, history, in_flight, file, last)
    totals = Totals(**meta["totals"])
    return Restored(history, in_flight, last, meta["left_at"], totals, meta["tracked"])


def _restore(
    loop: OuterLoop, entry: Mapping[str, Any], key: str, file: SavedRank, buffers: TransferBuffers
) -> Transfer:
    """Rebuild what `_describe` returned."""
    buffers.is_passed_on = entry.get("is_passed_on", False)
    has_mean = entry["has_arrived"] and not buffers.is_passed_on
    if entry["has_arrived"]:
        parity = ParityResult.of_saved([entry["parity"]], loop.transport.seat.ids)
        own = {"is_idle": entry["is_idle"], "anchor": entry["anchor"]}
        buffers.parity = replace(parity, **own, square=entry["parity"].get("square", 0.0))
    saved: dict[str, Tensor | None] = {
        "mean": buffers.begin() if has_mean else None,
        "sideband": buffers.sideband.values,
        "kept": buffers.kept,
        "posted": buffers.posted.values,
        "sent": None if buffers.is_shared else buffers.held_sent,
    }
    transfer = restored_transfer(loop, entry, buffers, file.read(f"in_flight.norm/{key}"))
    if buffers.is_shared and entry["can_redo"] and loop.state.is_sent(entry["fragment"]):
        codec = cast(EncodingChannel, loop.state.channels[entry["fragment"]].codec)
        messages = codec.messages(transfer.attempt.launch)
        if not _read_gathered(messages, file, key):
            saved |= {f"code.{name}": message for name, message in messages.items()}
    own_square = entry["parity"].get("square") if entry["has_arrived"] else None
    transfer.attempt.square = entry.get("square", own_square or None)
    transfer.attempt.place = entry.get("place", {})
    for name, tensor in saved.items():
        if tensor is not None and f"in_flight.{name}/{key}" in file:
            tensor.copy_(file.read(f"in_flight.{name}/{key}"))
    return transfer


def _read_gathered(messages: Mapping[str, Tensor], file: SavedRank, key: str) -> bool:
    """Read codes of before vectors had owners of slices: of all clusters' casts, one message.

    Returns False, and reads nothing, where the file has them as they are cut today.
    """
    small = [message for name, message in messages.items() if name.startswith("small.")]
    whole = f"in_flight.code.small.0/{key}"
    if len(small) < 2 or whole not in file or file.numel(whole) == small[0].numel():
        return False
    parts = file.read(whole).split([message.numel() for message in small])
    for message, part in zip(small, parts, strict=True):
        message.copy_(part)
    for name, message in messages.items():
        if not name.startswith("small."):
            message.copy_(file.read(f"in_flight.code.{name}/{key}"))
    return True


def restored_transfer(
    loop: OuterLoop,
    entry: Mapping[str, Any],
    buffers: TransferBuffers,
    norm: Tensor,
    bytes_sent: int | None = None,
    seconds: float | None = None,
) -> Transfer:
    """Return a transfer as it was saved, its parts in the buffers: it has ended, or not been
    taken up again yet. Sums over other ranks may take the place of those saved.
    """
    sync_params = SyncParams(**entry["sync_params"])
    fragment, launched = entry["fragment"], entry["launched"]
    is_here = entry["has_arrived"] or not loop.state.is_sent(fragment)
    here = is_here and Arrived(
        torch.empty(0) if buffers.is_passed_on else buffers.begin(),
        entry["bytes_sent"] if bytes_sent is None else bytes_sent,
        entry["seconds"] if seconds is None else seconds,
    )
    attempt = Attempt(
        Submission(fragment, launched, number=entry["number"]),
        Launch(entry["round"], sync_params.rank),
        buffers,
        lambda: entry["is_finite"],
        entry["is_idle"],
        entry["anchor"],
        told=entry.get("told", {}) if entry["has_arrived"] else {},
    )
    return Transfer(
        fragment=fragment,
        launched=launched,
        interval=entry["interval"],
        pending=here or Unresumed(attempt.what),
        attempt=attempt,
        contribution_norm=norm.to(loop.state.device),
        was_sent_before_update=entry["was_sent_before_update"],
        shared_by=entry["shared_by"],
        sync_params=sync_params,
    )
