"""Checkpoints of an engine whose script saves what it trains: beside the outer state, by rank."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsx.training.handle import Handle


class OwnSaves:
    """One rank's; `state` is what the rank saves itself, None if it has nothing to."""

    def __init__(self, handle: Handle, state: Callable[[], Any]) -> None:
        self._handle, self._state = handle, state
        handle.on_preemption(self._save_own)

    def save(self, base: Path, tag: str) -> None:
        """Save as `base/cluster_<m>/<tag>`, on all ranks of the cluster or on none. Collective.

        OSError on all ranks where any cannot write; then nothing is left of it.
        """
        folder, why = base / f"cluster_{self._handle.cluster_id}" / tag, ""
        try:
            with self._handle.saving():
                self._handle.write(folder)
                self._save_own(folder)
        except OSError as error:
            why = str(error)
        told = [""] * dist.get_world_size()
        dist.all_gather_object(told, why)
        if any(told):
            if dist.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise OSError("; ".join(f"rank {rank}: {one}" for rank, one in enumerate(told) if one))
        self._handle.saved(folder)

    def _save_own(self, folder: Path) -> None:
        state = self._state()
        if state is not None:
            data = io.BytesIO()
            torch.save(state, data)
            (folder / f"script_{dist.get_rank()}.pt").write_bytes(data.getvalue())
