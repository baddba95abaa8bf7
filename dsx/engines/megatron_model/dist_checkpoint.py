"""A Megatron checkpoint of a model in the torch_dist format, which any layout loads.

It is written by torch.distributed.checkpoint, whose files that format has, weight by weight, in one
process and without Megatron. It is a release: Megatron takes the weights of one and begins with its
own optimizer, at iteration 0.
"""

from __future__ import annotations

import gc
import io
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, SavePlanner, save
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dsx.checkpoint.tags import UNFINISHED
from dsx.checkpoint.weight_files import HasShape
from dsx.config.files import require_folder
from dsx.core.progress import SOON, Progress
from dsx.engines.megatron_model.dist_keys import (
    Piece,
    empty_states,
    pieces_of,
    require_keys_are_known,
)
from dsx.engines.megatron_model.notes import ModelNotes

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
_BACKENDS = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1,
    "common_backend": "torch", "common_backend_version": 1,
}  # fmt: skip


class MegatronModel(Protocol):
    """A model whose weights have Megatron's names, and are made when they are asked for."""

    @property
    def parameters(self) -> Mapping[str, HasShape]:
        """The weights by name, in the model's order."""
        ...

    @property
    def notes(self) -> ModelNotes:
        """What is known of the model."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return one weight, fp32."""
        ...


def require_no_checkpoint(out: Path) -> None:
    """Raise ValueError for a directory that checkpoints cannot be written to."""
    require_folder("--megatron", str(out))
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(
            f"--megatron {out} holds files already, which would be mixed up with these: remove it, "
            "or give another directory"
        )


def write_megatron(model: MegatronModel, out: Path, dtype: torch.dtype) -> list[Path]:
    """Write the directory that Megatron's --load takes, and return its files.

    It is complete or not there. ValueError, before anything is written, for a model whose weights
    have other places in such a checkpoint than dsx knows.
    """
    require_keys_are_known(model.notes)
    unfinished = out.with_name(f"{out.name}{UNFINISHED}")
    shutil.rmtree(unfinished, ignore_errors=True)
    release = unfinished / RELEASE
    release.mkdir(parents=True)
    planner = _Streamed(model, dtype, out)
    # nothing is read ahead: weights are in memory one at a time
    writer = FileSystemWriter(release, per_thread_copy_ahead=0)
    with warnings.catch_warnings():  # that there is one process alone, as there is to be
        warnings.filterwarnings("ignore", "torch.distributed is .*single process", UserWarning)
        save({}, storage_writer=writer, planner=planner)
    common = {
        "checkpoint_version": 3.0, "iteration": 0,
        "content_metadata": {"singleton_local_shards": False},
    }  # fmt: skip
    torch.save(common, release / "common.pt")
    (release / "metadata.json").write_text(json.dumps(_BACKENDS))
    (unfinished / TRACKER).write_text(RELEASE)
    if out.is_dir():
        out.rmdir()  # empty
    unfinished.rename(out)
    return sorted(path for path in out.rglob("*") if path.is_file())


class _Streamed(SavePlanner):
    """Says what is written, and makes each weight when it is its turn."""

    def __init__(self, model: MegatronModel, dtype: torch.dtype, out: Path) -> None:
        self._model = model
        self._dtype = dtype
        self._pieces: dict[tuple[str, tuple[int, ...]], Piece] = {}
        for piece in pieces_of(model.parameters, model.notes):
            self._pieces[piece.key, piece.offset] = piece
        self._last: tuple[str, Tensor] | None = None
        sizes = [torch.Size(piece.shape).numel() for piece in self._pieces.values()]
        self._progress = Progress(
            f"weights for {out}", dtype.itemsize * sum(sizes), True, first_seconds=SOON
        )

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """There is no state dict: what is written is the model's."""

    def create_local_plan(self) -> SavePlan:
        """Return what is written, in the model's order."""
        items = [*self._tensors(), *self._states()]
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans with the checkpoint's metadata."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return one weight in its form, or an empty state."""
        if write_item.type == WriteItemType.BYTE_IO:
            state = io.BytesIO()
            torch.save([None], state)  # as Megatron writes them, a list of a rank's
            return state
        assert write_item.index.offset is not None
        piece = self._pieces[write_item.index.fqn, tuple(write_item.index.offset)]
        if self._last is None or self._last[0] != piece.source:
            self._last = None  # before the next is read
            gc.collect(1)  # torch 2.6 leaves what it has saved in a cycle of references
            self._last = piece.source, self._model.tensor(piece.source)
        made = piece.form(self._last[1]).to(self._dtype)
        self._progress.moved(made.numel() * made.element_size())
        return made.reshape(*(1 for _ in piece.lead), *piece.shape).contiguous()

    def _tensors(self) -> Iterator[WriteItem]:
        properties = TensorProperties(dtype=self._dtype)
        for piece in self._pieces.values():
            chunk = ChunkStorageMetadata(
                torch.Size(piece.offset), torch.Size([*(1 for _ in piece.lead), *piece.shape])
            )
            size = torch.Size([*piece.counts, *piece.shape])
            yield WriteItem(
                MetadataIndex(piece.key, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, size),
            )

    def _states(self) -> Iterator[WriteItem]:
        for key in empty_states(self._model.parameters, self._model.notes):
            yield WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
