"""The files of `torch.distributed.checkpoint`: written beside training, read as far as needed.

A rank reads the rows that it keeps from now on out of what other ranks have saved, where torch's
own reader takes every saved shard that it needs a part of as a whole. The files are Python pickles:
nothing in them is run but what makes torch's own tensors and plain values.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping
from concurrent.futures import Future as Written
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from torch.utils._pytree import tree_map

from dsx.engines.noted_files import new_noting_writer

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": None,  # all of it: plain classes
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path"},
    "collections": {"OrderedDict"},
}
_METADATA = ".metadata"


def new_host_group_of_all(seconds: float) -> Any:
    """Return a group of all ranks of the cluster's world on the host. Collective in the cluster."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))


class EnginePart:
    """One rank's part of a state, on its way to files; as a `Snapshot` is of the outer state.

    With `detach` it is copied to host memory, pinned where the model is on a CUDA device, and torch
    writes it on a thread. OSError says why this rank could not; who could returns.
    """

    def __init__(self, state: Mapping[str, Any], path: Path, group: Any, stager: Any) -> None:
        self._state, self._path, self._group = dict(state), path, group
        self._stager = stager
        self._future: Written[Any] | None = None

    def detach(self) -> None:
        """Copy all, and let it be written: training is about to go on."""
        more: dict[str, Any] = {} if self._stager is None else {"async_stager": self._stager}
        more |= {"storage_writer": new_noting_writer(self._path)}
        if not hasattr(staging, "DefaultStager"):
            self._state = tree_map(_apart, self._state)
        given: Any = dcp.async_save(
            self._state, checkpoint_id=self._path, process_group=self._group, **more
        )
        self._state = {}
        self._future = getattr(given, "upload_completion", given)

    def release(self, fragment: int) -> None:
        """Nothing to do: what is held is a copy."""

    def give_up(self) -> None:
        """Wait for what is being written, which nobody wants any more."""
        if self._future is not None:
            self._future.exception()

    def write(self) -> None:
        """Return once it is written. Collective in the cluster."""
        try:
            if self._future is None:
                state, self._state = self._state, {}
                writer = new_noting_writer(self._path)
                dcp.save(
                    state,
                    checkpoint_id=self._path,
                    storage_writer=writer,
                    process_group=self._group,
                )
            else:
                self._future.result()
        except CheckpointException as error:
            own: Any = error.failures.get(dist.get_rank(self._group))
            if own is None:
                return  # another rank's, which tells of it
            why = getattr(own[0], "strerror", None) or f"{type(own[0]).__name__}: {own[0]}"
            where = getattr(own[0], "filename", None)
            raise OSError(getattr(own[0], "errno", None), why, where or self._path) from error


def _apart(value: Any) -> Any:
    """Return a copy of a tensor on the CPU: torch 2.6 copies those of devices alone.

    It would write the others from where they lie, which the next step changes.
    """
    is_there = isinstance(value, Tensor) and value.device.type == "cpu"
    return value.detach().clone() if is_there else value


def new_stager(device: torch.device) -> Any:
    """Return what copies to pinned memory, and keeps that memory for the next save; None: torch's.

    To be closed behind the last save.
    """
    if device.type != "cuda" or not hasattr(staging, "DefaultStager"):
        return None
    options = staging.StagingOptions(
        use_pinned_memory=True,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=True,
    )
    return staging.DefaultStager(options)


def read_metadata(path: Path) -> Metadata:
    """Return what a folder of these files holds; ValueError if it would run other code."""
    with (path / _METADATA).open("rb") as file:
        found: Metadata = _PlainMetadata(file).load()
    return found


def load(state: dict[str, Any], path: Path, group: Any) -> None:
    """Load into the tensors of `state`, of its other values anew. Collective in the cluster.

    ValueError on every rank where one cannot read it.
    """
    try:
        dcp.load(
            state, storage_reader=PartReader(path), planner=_PlainPlanner(), process_group=group
        )
    except CheckpointException as error:
        raise ValueError(f"{path} is not loaded: {_told(error)}") from error


class PartReader(dcp.FileSystemReader):
    """Reads the rows that are wanted of what was saved, and no more."""

    _metadata: Metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, and keep it."""
        return read_metadata(Path(self.path))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Keep what is known of the saved shards."""
        self._metadata = metadata
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's rows; what does not lie in rows is left to torch's own reader."""
        left: list[ReadItem] = []
        for item in plan.items:
            rows = self._read_rows(item) if item.type == LoadItemType.TENSOR else None
            if rows is None:
                left.append(item)
                continue
            target = planner.resolve_tensor(item).detach()
            target.copy_(rows.view(target.shape))
            planner.commit_tensor(item, target)
        return super().read_data(LoadPlan(left), planner)

    def _read_rows(self, item: ReadItem) -> Tensor | None:
        """Return the elements of a part that is whole but for its first dimension, in a row."""
        stored = self._metadata.state_dict_metadata[item.storage_index.fqn]
        sizes = _chunk_of(stored, item.storage_index)
        offsets, lengths = list(item.storage_offsets), list(item.lengths)
        if not sizes or list(sizes[1:]) != lengths[1:] or sizes[0] == lengths[0]:
            return None
        dtype = cast(TensorStorageMetadata, stored).properties.dtype
        info = self.storage_data[item.storage_index]
        if getattr(info, "transform_descriptors", None):  # torch 2.6 knows of none
            return None
        width = math.prod(lengths[1:]) * dtype.itemsize
        with (Path(self.path) / info.relative_path).open("rb") as file:
            start = _start_of_elements(self._slice_file(file, info))
            if start is None:
                return None
            file.seek(info.offset + start + offsets[0] * width)
            content = bytearray(file.read(lengths[0] * width))
        return torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)


class _PlainPlanner(DefaultLoadPlanner):
    """Takes plain values, and no other code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = torch.load(value, weights_only=True)
        again = io.BytesIO()
        torch.save(plain, again)
        again.seek(0)
        super().load_bytes(read_item, again)


class _PlainMetadata(pickle.Unpickler):
    """Makes torch's metadata, and nothing else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        names = _ALLOWED.get(module_name, set())
        is_of_torch = module_name == "torch" and (
            global_name == "Size" or isinstance(getattr(torch, global_name, None), torch.dtype)
        )
        if is_of_torch or names is None or global_name in names:
            return super().find_class(module_name, global_name)
        raise ValueError(
            f"{_METADATA} names {module_name}.{global_name}, which is nothing of a checkpoint's: "
            "it would run code; load another one"
        )


def _chunk_of(stored: Any, index: Any) -> list[int]:
    """Return the sizes of the saved shard that an index names; [] if they are not known."""
    chunks = stored.chunks if isinstance(stored, TensorStorageMetadata) else []
    if index.index is not None and index.index < len(chunks):
        chunk = chunks[index.index]
        if index.offset is None or chunk.offsets == index.offset:
            return list(chunk.sizes)
    found = [chunk for chunk in chunks if chunk.offsets == index.offset]
    return list(found[0].sizes) if found else []


def _start_of_elements(archive: Any) -> int | None:
    """Return where a tensor's elements begin in torch's archive of it; None if that is not told."""
    of_torch: Any = torch
    reader = of_torch._C.PyTorchFileReader(archive)
    records = [name for name in reader.get_all_records() if name.startswith("data/")]
    is_little = reader.has_record("byteorder") and reader.get_record("byteorder") == b"little"
    if len(records) != 1 or not is_little:
        return None
    start: int = reader.get_record_offset(records[0])
    return start


def _told(error: CheckpointException) -> str:
    """Say which ranks have failed, and why."""
    found: list[str] = []
    for rank, failure in sorted(error.failures.items()):
        cause: Any = failure[0]
        why = getattr(cause, "strerror", None) or (str(cause).splitlines() or [""])[0]
        where = getattr(cause, "filename", None)
        told = f"{why} ({where})" if where else f"{type(cause).__name__}: {why}"
        found.append(f"rank {rank}: {told}")
    return "; ".join(found[:4])
