"""What of outer training all clusters share: copied at a boundary, loaded by one that heals.

Anchors, outer momenta, what policies say they share, what guard and parity check remember, codecs'
warm starts, and the history. Of transfers under way it says which there are; their results follow
(following.py). What is a cluster's own begins anew: masters at the anchors, residuals at zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from dsx.compress.base import Launch
from dsx.core.on_device import on_device
from dsx.core.transport import Submission
from dsx.core.types import History, SyncParams
from dsx.outer.attempt import Attempt
from dsx.outer.channel import common_slots
from dsx.outer.loop import OuterLoop
from dsx.outer.parcel import Parcel
from dsx.outer.results import Results
from dsx.outer.resuming import Unresumed
from dsx.outer.transfer import Arrived, NothingYet, Transfer


def copy_shared(loop: OuterLoop, results: Results, prunes: bool) -> Callable[[], Parcel] | None:
    """Return what copies this rank's part, as of the boundary just passed, to the host.

    On the training thread; what is returned may run on another one, and has to end before anything
    of what is shared changes (`OuterLoop.before_change`). Results of what is under way are kept,
    and no earlier ones if it `prunes` them. None if one of those has come before they were kept,
    and cannot be had any more.
    """
    under_way = [t for t in loop.in_flight if isinstance(t, Transfer)]
    sent = [t for t in under_way if loop.state.is_sent(t.fragment)]
    if prunes:
        results.drop(results.numbers - {t.attempt.what.number for t in sent})
    for transfer in sent:
        channel = loop.state.channels[transfer.fragment]
        is_over = transfer.pending.has_arrived
        if is_over and not results.keep_arrived(transfer.attempt, channel):
            return None
    shared = _shared(loop, {t.fragment for t in under_way})
    values = {
        "history": loop.history.state_dict(),
        "under_way": [_described(transfer) for transfer in loop.in_flight],
        "places": loop.notices.places.state_dict(),
    }

    device, stream = loop.state.device, None
    if device.type == "cuda":  # behind what this thread has given the device, beside what follows
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))

    def copy() -> Parcel:
        with on_device(device), nullcontext() if stream is None else torch.cuda.stream(stream):
            on_host = {n: t.detach().to("cpu", copy=True).contiguous() for n, t in shared.items()}
        return Parcel(values, on_host)

    return copy


@torch.no_grad()
def load_shared(loop: OuterLoop, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Go on from what others share. Collective over the ranks of the cluster.

    What is under way is then submitted, in order, by `loop.settle()`.
    """
    method, state, adapter = loop.method, loop.state, loop.adapter
    state.free_buffers()
    history = History.from_state_dict(dict(values["history"]))
    under_way = {entry["fragment"] for entry in values["under_way"] if "number" in entry}
    for fragment in adapter.fragments:
        state.before_write(fragment.id)
    for name, tensor in _shared(loop, under_way).items():
        if tensor.numel() and not name.startswith("guard/"):
            tensor.copy_(tensors[name])
    for fragment in adapter.fragments:
        anchor, slots = state.anchor[fragment.id], state.slots[fragment.id]
        kept = {name: slots.delay[name].clone() for name in method.delay.shared_slots}
        method.delay.begin(anchor, slots.delay)
        for name, tensor in kept.items():
            slots.delay[name].copy_(tensor)
        if "start" in slots.staleness:
            slots.staleness["start"].copy_(anchor)
        adapter.write(fragment.id, anchor)
        loop.guard.begin_anew(fragment.id, tensors.get(f"guard/{fragment.id}", torch.empty(0)))
    in_flight = [_restored(loop, entry) for entry in values["under_way"]]
    for fragment in adapter.fragments:
        rounds = [
            t.attempt.round for t in in_flight
            if isinstance(t, Transfer) and t.fragment == fragment.id
        ]  # fmt: skip
        next_round = min(rounds, default=history.launches[fragment.id] + 1)
        state.channels[fragment.id].restored(next_round)
    loop.restore(history, in_flight, has_trained=False)
    loop.notices.places.load(values["places"], is_of_others=True)
    adapter.sync_model_weights()


def saved_names(loop: OuterLoop) -> dict[str, str]:
    """Return, of what is copied and is in a checkpoint too, the name that it has there."""
    saved = {
        id(tensor): f"{name}/{fragment.id}"
        for fragment in loop.adapter.fragments
        for name, tensor in loop.state.named_state(fragment.id).items()
    }
    shared = _shared(loop, set())
    return {name: saved[id(tensor)] for name, tensor in shared.items() if id(tensor) in saved}


def _shared(loop: OuterLoop, under_way: set[int]) -> dict[str, Tensor]:
    """Return all of it by name, where it lies; of channels only where nothing is under way."""
    named: dict[str, Tensor] = {}
    for fragment in loop.adapter.fragments:
        p, slots = fragment.id, loop.state.slots[fragment.id]
        for place, tensor in enumerate(loop.recovery.shared_state(p)):
            named[f"shared.{place}/{p}"] = tensor
        for name in loop.method.delay.shared_slots:
            named[f"delay.{name}/{p}"] = slots.delay[name]
        named[f"guard/{p}"] = loop.guard.last[p]
        if p not in under_way and loop.state.is_sent(p):
            channel = loop.state.channels[p]
            named[f"memory/{p}"] = channel.parity_check.memory
            for name, tensor in common_slots(channel).items():
                named[f"codec.{name}/{p}"] = tensor
    return named


def _described(transfer: Transfer | NothingYet) -> dict[str, Any]:
    if isinstance(transfer, NothingYet):
        return {"fragment": transfer.fragment}
    return {
        "fragment": transfer.fragment,
        "launched": transfer.launched,
        "interval": transfer.interval,
        "number": transfer.attempt.what.number,
        "round": transfer.attempt.round,
        "sync_params": asdict(transfer.sync_params),
    }


def _restored(loop: OuterLoop, entry: Mapping[str, Any]) -> Transfer | NothingYet:
    """Return a transfer under way as others have launched it: this cluster has sent nothing."""
    if "number" not in entry:
        return NothingYet(entry["fragment"])
    fragment, sync_params = entry["fragment"], SyncParams(**entry["sync_params"])
    buffers = loop.state.take_buffers(fragment, entry["round"])
    if buffers.kept is not None:
        buffers.kept.zero_()
        if loop.method.delay.keeps == "local":
            buffers.kept.copy_(loop.state.anchor[fragment])
    what = Submission(fragment, entry["launched"], number=entry["number"])
    launch = Launch(entry["round"], sync_params.rank)
    attempt = Attempt(what, launch, buffers, lambda: True, is_idle=True)
    return Transfer(
        fragment=fragment,
        launched=entry["launched"],
        interval=entry["interval"],
        pending=Unresumed(what) if loop.state.is_sent(fragment) else Arrived(buffers.begin()),
        attempt=attempt,
        contribution_norm=torch.zeros((), device=loop.state.device),
        sync_params=sync_params,
    )
