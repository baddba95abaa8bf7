"""Outer state on disk: one safetensors file per rank, transfers in flight included.

A transfer in flight is waited for and its mean stored with the step it was launched at; on load
it is applied at its own due step, so a resumed run equals one that was never stopped. Never is a
transfer issued again on one side only. The layout travels with the buffers: a file that belongs
to another model, shard or fragmentation is refused by name.

A tag is complete once rank 0 has written `dsx.json`, after every rank's files: clusters resume
from the newest tag that all of them hold complete.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dsx.guard import Verdict
from dsx.outer_loop import OuterLoop
from dsx.transfer import Arrived, NothingYet, Totals, Transfer
from dsx.types import Fragment, History, Knobs

FORMAT = 4
COMPLETE_MARK = "dsx.json"
logger = logging.getLogger(__name__)


def rank_file(directory: Path, rank: int) -> Path:
    """Return the path of one rank's outer state inside a tag's directory."""
    return directory / f"dsx_rank_{rank:05d}.safetensors"


def save_state(
    loop: OuterLoop, path: Path, axes: Mapping[str, Any], tracked: Mapping[str, Any]
) -> None:
    """Write one rank's outer state; waits for what is in flight. Atomic per file."""
    tensors: dict[str, torch.Tensor] = {}
    for fragment in loop.backend.fragments:
        for name, tensor in loop.state.named_state(fragment.id).items():
            if tensor.numel():
                tensors[f"{name}/{fragment.id}"] = tensor
    in_flight = [_describe(t, index, tensors) for index, t in enumerate(loop.in_flight)]
    meta = {
        "format": FORMAT,
        "history": loop.history.state_dict(),
        "in_flight": in_flight,
        "layout": layout(loop.backend.fragments),
        "state": _state_shape(loop),
        "axes": axes,
        "tracked": tracked,
        "totals": asdict(loop.totals),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    copies = {name: t.detach().to("cpu").contiguous() for name, t in tensors.items()}
    save_file(copies, str(unfinished), metadata={"dsx": json.dumps(meta)})
    unfinished.replace(path)


def load_state(loop: OuterLoop, path: Path, axes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Restore one rank's outer state into `loop` and return the tracked states.

    FileNotFoundError if the file is missing, ValueError if it belongs to another run's layout.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"no outer state at {path}: the checkpoint was written without dsx or by fewer ranks"
        )
    for transfer in loop.in_flight:
        if isinstance(transfer, Transfer):
            transfer.pending.wait()  # its thread still writes to the buffers that are restored
    with safe_open(str(path), framework="pt") as file:
        meta = json.loads((file.metadata() or {}).get("dsx", "{}"))
        _require_same_layout(path, meta, loop)
        _require_same_state(path, meta, axes, loop)
        _warn_of_changes(path, meta["axes"], axes)
        for fragment in loop.backend.fragments:
            for name, tensor in loop.state.named_state(fragment.id).items():
                if tensor.numel():
                    tensor.copy_(file.get_tensor(f"{name}/{fragment.id}"))
        loop.state.free_berths()
        in_flight = [
            _restore(loop, entry, index, file) for index, entry in enumerate(meta["in_flight"])
        ]
    loop.restore(History.from_state_dict(meta["history"]), in_flight)
    loop.totals = Totals(**meta["totals"])
    return meta["tracked"]


def layout(fragments: Sequence[Fragment]) -> list[Any]:
    """Return this rank's fragments as plain lists: what must match between runs and clusters."""
    return [
        {
            "id": fragment.id,
            "slots": [
                {"name": s.name, "shape": list(s.shape), "start": s.start} for s in fragment.layout
            ],
        }
        for fragment in fragments
    ]


def mark_complete(directory: Path, step: int, session: str) -> None:
    """Declare a tag's directory complete; call on rank 0 after every rank has written.

    `session` is the name of this run that all clusters share: it tells two runs apart that used
    the same tag.
    """
    unfinished = directory / f"{COMPLETE_MARK}.tmp"
    unfinished.write_text(json.dumps({"format": FORMAT, "step": step, "session": session}))
    unfinished.replace(directory / COMPLETE_MARK)


def complete_tags(directory: Path) -> dict[str, list[Any]]:
    """Return `{tag: [inner step, session]}` of what is complete below a cluster's directory."""
    marks = directory.glob(f"*/{COMPLETE_MARK}") if directory.is_dir() else ()
    contents = {mark.parent.name: json.loads(mark.read_text()) for mark in marks}
    return {tag: [content["step"], content["session"]] for tag, content in contents.items()}


def common_tag(tags: Sequence[Mapping[str, list[Any]]], directory: Path, wanted: str | None) -> str:
    """Choose the tag `wanted`, or else the one with the most steps, that every cluster holds.

    All of them must have written it in the same run; FileNotFoundError lists what each holds.
    """
    common = [
        tag
        for tag, content in tags[0].items()
        if wanted in (None, tag) and all(other.get(tag) == content for other in tags[1:])
    ]
    if not common:
        held = "; ".join(f"cluster {m}: {sorted(t) or 'none'}" for m, t in enumerate(tags))
        what = f"checkpoint {wanted!r}" if wanted else "checkpoint"
        raise FileNotFoundError(
            f"no complete {what} that all clusters hold under {directory} from one run ({held})"
        )
    return max(common, key=lambda tag: tags[0][tag][0])


def first_difference(ours: Any, theirs: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Return `(path, our value, their value)` where two plain structures first differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in [*ours, *(k for k in theirs if k not in ours)]:
            found = first_difference(ours.get(key), theirs.get(key), f"{path}.{key}".lstrip("."))
            if found:
                return found
        return None
    if isinstance(ours, list) and isinstance(theirs, list):
        for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            found = first_difference(a, b, f"{path}[{index}]")
            if found:
                return found
        same = len(ours) == len(theirs)
        return None if same else (f"the length of {path}", len(ours), len(theirs))
    return None if ours == theirs else (path, ours, theirs)


def _describe(
    transfer: Transfer | NothingYet, index: int, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Return a transfer under way as JSON values; its buffers go to `tensors`, in place."""
    if isinstance(transfer, NothingYet):
        return {"fragment": transfer.fragment, "is_empty": True}
    mean = transfer.pending.wait()
    buffers = {
        "mean": mean,
        "notes": transfer.berth.notes.values,
        "kept": transfer.berth.kept,
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
        "knobs": asdict(transfer.knobs),
        "verdict": asdict(transfer.berth.verdict),
        "bytes_sent": transfer.pending.bytes_sent,
        "seconds": transfer.pending.seconds,
    }


def _restore(
    loop: OuterLoop, entry: Mapping[str, Any], index: int, file: Any
) -> Transfer | NothingYet:
    """Rebuild what `_describe` returned, in a berth of the loop's."""
    fragment = entry["fragment"]
    if entry["is_empty"]:
        return NothingYet(fragment)
    berth = loop.state.take_berth(fragment)
    berth.verdict = Verdict(**entry["verdict"])
    buffers = {"mean": berth.wire, "notes": berth.notes.values, "kept": berth.kept}
    for name, tensor in buffers.items():
        if tensor is not None and tensor.numel():
            tensor.copy_(file.get_tensor(f"in_flight.{name}/{index}"))
    return Transfer(
        fragment=fragment,
        launched=entry["launched"],
        interval=entry["interval"],
        pending=Arrived(berth.wire, entry["bytes_sent"], entry["seconds"]),
        berth=berth,
        contribution_norm=file.get_tensor(f"in_flight.norm/{index}").to(loop.state.device),
        was_sent_before_update=entry["was_sent_before_update"],
        shared_by=entry["shared_by"],
        knobs=Knobs(**entry["knobs"]),
    )


def _require_same_layout(path: Path, meta: Mapping[str, Any], loop: OuterLoop) -> None:
    if meta.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not an outer state of format {FORMAT}: found {meta.get('format')!r}"
        )
    difference = first_difference(layout(loop.backend.fragments), meta["layout"], "fragments")
    if difference:
        where, ours, theirs = difference
        raise ValueError(
            f"{path} belongs to another layout: {where} is {theirs} there and {ours} here; resume "
            "with the same model, fragments, ZeRO stage and number of ranks"
        )


def _state_shape(loop: OuterLoop) -> dict[str, Any]:
    """Return what a method keeps, as JSON values: transfers under way, buffers, notes."""
    fragments = range(len(loop.backend.fragments))
    buffers = {
        f"{name}/{p}": tensor.numel() for p in fragments for name, tensor in
        sorted(loop.state.named_state(p).items())
    }  # fmt: skip
    return {
        "rounds_under_way": loop.method.delay.rounds_under_way,
        "numbers beside a transfer": [loop.state.note_numel(p) for p in fragments],
        "buffers": buffers,
    }


def _require_same_state(
    path: Path, meta: Mapping[str, Any], axes: Mapping[str, Any], loop: OuterLoop
) -> None:
    """Refuse another type on an axis, or other buffers: what is saved would mean something else."""
    advice = "resume with the method it was saved with, or start a new run from the model's weights"
    for axis, ours in axes.items():
        theirs = meta["axes"].get(axis, {})
        kinds = [choice.get("type", choice.get("by")) for choice in (theirs, ours)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"{path} was saved with {axis} of type {kinds[0]!r}, and this run has "
                f"{kinds[1]!r}: {advice}"
            )
    difference = first_difference(_state_shape(loop), meta["state"])
    if difference:
        where, ours, theirs = difference
        raise ValueError(f"{path} holds {where}={theirs}, and this method {ours}: {advice}")


def _warn_of_changes(path: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    difference = first_difference(json.loads(json.dumps(current)), saved)
    if difference:
        where, ours, theirs = difference
        logger.warning("%s was saved with %s=%s; going on with %s", path, where, theirs, ours)
