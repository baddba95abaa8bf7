"""What is kept of a run: hashes of weights and of outer state, and records without their seconds.

A run is `{"weights": {...}, "state": {...}, "records": {...}, "values": {...}}`, all of it JSON.
Records go by the field names of 0.1.0, whatever the tree that wrote them calls them: `OLD_NAMES`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .differences import differences

OLD_NAMES: dict[str, str] = {}  # a field's name in a later version -> its name in 0.1.0
SENT_BESIDE = ("notes", "sideband")  # numbers that travel beside a transfer: seconds are in there
KINDS_OF_START = ("preset", "num_clusters", "ranks", "stages", "parameters")
Run = dict[str, Any]


def new_run() -> Run:
    return {"weights": {}, "state": {}, "records": {}, "values": {}}


def digest(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> str:
    """Return one SHA-256 of tensors with their names, types and shapes, in the order of names."""
    found = hashlib.sha256()
    for name, tensor in sorted(dict(tensors).items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(_bytes(tensor))
    return found.hexdigest()


def weights_of(model: torch.nn.Module) -> str:
    return digest({name: p.detach() for name, p in model.named_parameters()})


def state_in(path: Path) -> list[str]:
    """Return the hashes of the vectors in a rank's outer state, whatever the file calls them."""
    from safetensors import safe_open

    hashes: list[str] = []
    with safe_open(str(path), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            if not any(word in name for word in SENT_BESIDE):
                hashes.append(hashlib.sha256(_bytes(file.get_tensor(name))).hexdigest())
    return sorted(hashes)


def sync_record(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a sync's record says, seconds left out, under the old names."""
    plain: dict[str, Any] = {}
    for name, value in event.items():
        if not (name.endswith("_seconds") or name in ("time", "kind")):
            plain[OLD_NAMES.get(name, name)] = value.item() if hasattr(value, "item") else value
    return plain


def in_order(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort records of syncs: a cluster's ranks may hand them on in another order."""
    keys = ("cluster", "applied_step", "stage", "fragment", "launched_step")
    return sorted(records, key=lambda record: [record.get(key, 0) for key in keys])


def records_in(directory: Path) -> dict[str, Any]:
    """Return the records of a run's directory: syncs, and of steps and ends what is no second."""
    syncs: list[dict[str, Any]] = []
    losses: dict[str, list[Any]] = {}
    others: list[dict[str, Any]] = []
    for path in sorted(directory.glob("metrics*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == "sync":
                syncs.append(sync_record(record))
            elif record["kind"] == "step":
                losses.setdefault(path.name, []).append([record["step"], record.get("loss")])
            elif record["kind"] == "start":
                kept = {key: record[key] for key in KINDS_OF_START}
                others.append({"kind": "start", "cluster": record["cluster"], **kept})
            else:
                others.append({k: v for k, v in record.items() if k != "time"})
    return {"syncs": in_order(syncs), "losses": losses, "others": others}


def not_as_uninterrupted(whole: Run, resumed: Run, stop: int) -> list[str]:
    """Name what a run resumed at `stop` has otherwise than one that was never stopped.

    Its weights and the outer state that it ends with, every sync and every loss; those of before
    the stop are in the same records.
    """
    found: list[str] = []
    for part in ("weights", "state"):
        found += differences(whole[part], {k: resumed[part][k] for k in whole[part]}, part)
    for key in ("syncs", "losses"):
        found += differences(whole["records"][key], resumed["records"][key], key)
    syncs = resumed["records"]["syncs"]
    if not any(sync["applied_step"] > stop for sync in syncs):
        found.append(f"nothing was applied after step {stop}: the run proves nothing")
    return found


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
