"""A transfer under way on disk: its mean, what travels beside it, and when it was launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from dsx.checkpoint.files import SavedRank
from dsx.core.types import SyncParams
from dsx.outer.loop import OuterLoop
from dsx.outer.parity_check import ParityResult
from dsx.outer.transfer import Arrived, NothingYet, Transfer, TransferBuffers


def describe(
    transfer: Transfer | NothingYet, index: int, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Return a transfer under way as JSON values; its buffers go to `tensors`, in place."""
    if isinstance(transfer, NothingYet):
        return {"fragment": transfer.fragment, "is_empty": True}
    mean = transfer.pending.wait()
    sideband = transfer.buffers.sideband
    buffers = {
        "mean": mean,
        "sideband": sideband.values,
        "kept": transfer.buffers.kept,
        "norm": transfer.contribution_norm,
    }
    for name, tensor in buffers.items():
        if tensor is not None and tensor.numel():
            tensors[f"in_flight.{name}/{index}"] = tensor
    return {
        "fragment": transfer.fragment,
        "is_empty": False,
        "launched": transfer.launched,
        "interval": transfer.interval,
        "was_sent_before_update": transfer.was_sent_before_update,
        "shared_by": transfer.shared_by,
        "sync_params": asdict(transfer.sync_params),
        "parity": asdict(transfer.buffers.parity),
        "sideband": asdict(sideband.shape),
        "bytes_sent": transfer.pending.bytes_sent,
        "seconds": transfer.pending.seconds,
    }


def restore(
    loop: OuterLoop, entry: Mapping[str, Any], index: int, file: SavedRank
) -> Transfer | NothingYet:
    """Rebuild what `describe` returned, in buffers of the loop's."""
    fragment = entry["fragment"]
    if entry["is_empty"]:
        return NothingYet(fragment)
    buffers = loop.state.take_buffers(fragment)
    buffers.parity = ParityResult.of_saved([entry["parity"]], loop.transport.seat.ids)
    saved = {"mean": buffers.wire, "sideband": buffers.sideband.values, "kept": buffers.kept}
    for name, tensor in saved.items():
        if tensor is not None and tensor.numel():
            tensor.copy_(file.read(f"in_flight.{name}/{index}"))
    norm = file.read(f"in_flight.norm/{index}").to(loop.state.device)
    return restored_transfer(entry, buffers, norm, entry["bytes_sent"], entry["seconds"])


def restored_transfer(
    entry: Mapping[str, Any],
    buffers: TransferBuffers,
    norm: Tensor,
    bytes_sent: int,
    seconds: float,
) -> Transfer:
    """Return a transfer that has ended, with its mean in the buffers, as it was saved."""
    return Transfer(
        fragment=entry["fragment"],
        launched=entry["launched"],
        interval=entry["interval"],
        pending=Arrived(buffers.wire, bytes_sent, seconds),
        buffers=buffers,
        contribution_norm=norm,
        was_sent_before_update=entry["was_sent_before_update"],
        shared_by=entry["shared_by"],
        sync_params=SyncParams(**entry["sync_params"]),
    )
