"""The outer state of one cluster as it lies on disk: a file per rank, found by parameter.

Each vector of a file goes with the layout it was saved under, so that any run of elements of any
parameter can be found again, whatever the shards were then and are now.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from dsx.checkpoint.checksums import earlier_tags, of_text
from dsx.checkpoint.exact_reads import TensorFile
from dsx.compress.error_feedback import read_part
from dsx.compress.owners import CODES, SCALES
from dsx.config.renames import stored_axes
from dsx.core.renamed import warn_renamed
from dsx.core.types import Fragment, Slot, Stage
from dsx.method.fragments import in_a_row

FORMAT = 11
META_CHECKSUM = "dsx.sha256"  # read alone, before a whole file is looked over
_FORMAT_6 = {"place": "rank_info", "knobs": "sync_params", "notes": "sideband", "verdict": "parity"}
_WRAPPERS = re.compile(r"^module\.|(?<![^.])(_orig_mod|_checkpoint_wrapped_module)\.")
# what is kept by the name of a parameter: before it, the name, and behind
_OF_PARAMETER = re.compile(rf"(.*?codec\.(?:{re.escape(CODES)}|{re.escape(SCALES)}))([^/]*)(.*)")
_TENSORS_6 = {"in_flight.notes/": "in_flight.sideband/", "guard.memory/": "parity_check.memory/"}


def rank_file(directory: Path, rank: int) -> Path:
    """Return the path of one rank's outer state inside a tag's directory."""
    return directory / f"dsx_rank_{rank:05d}.safetensors"


def layout(fragments: Sequence[Fragment]) -> list[Any]:
    """Return fragments as plain lists: what must match between runs and clusters."""
    return [
        {
            "id": fragment.id,
            "slots": [
                {"name": s.name, "shape": list(s.shape), "start": s.start} for s in fragment.layout
            ],
        }
        for fragment in fragments
    ]


class SavedRank:
    """One rank's file, open; ValueError if it is not an outer state of this format.

    `names` are the parameters' of today, under which what was saved with a wrapper's is found, too.
    """

    def __init__(self, path: Path, names: Collection[str] = ()) -> None:
        self.path = path
        if not path.exists():
            raise FileNotFoundError(
                f"no outer state at {path}: the checkpoint was written without dsx, or not whole"
            )
        try:
            self._file = TensorFile(path)
            told = self._file.metadata
            text = told.get("dsx", "{}")
            if told.get(META_CHECKSUM, of_text(text)) != of_text(text):
                raise ValueError("its checksum is another")
            self.meta: dict[str, Any] = json.loads(text)
            self._names = {name: name for name in self._file.names}
        except ValueError as error:
            raise ValueError(
                f"{path} cannot be read: {error}; {earlier_tags(path.parent)}"
            ) from error
        if self.meta.get("format") == 6:
            self._translate(path)
        if self.meta.get("format") == 7:
            self.meta |= {"format": 8, "engine_holds": "local"}
        if self.meta.get("format") == 8:
            self.meta |= {"format": 9, **_of_format_8(self.meta)}
        # of 9 all means lie there; of 10, too, warm starts are in fp32 (warm_starts.py)
        if self.meta.get("format") in (9, 10):
            self.meta["format"] = FORMAT
        if self.meta.get("format") != FORMAT:
            raise ValueError(
                f"{path} is not an outer state of format {FORMAT} (or 6 to 10): found "
                f"{self.meta.get('format')!r}"
            )

        self._unwrap(names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        """Return a tensor, or the elements start..stop of a vector, from disk."""
        return self._file.read(self._names[name], start, stop)

    def numel(self, name: str) -> int:
        """Return how many elements a vector has, which is not read."""
        return self._file.shape(self._names[name])[0]

    def _translate(self, path: Path) -> None:
        """Give what dsx 0.1 has written the names of today, in place."""
        old, new = (
            "outer state of format 6 (dsx 0.1)",
            f"of format {FORMAT}, which the next save writes",
        )
        warn_renamed(old, new, str(path))

        def today(entry: Mapping[str, Any]) -> dict[str, Any]:
            return {_FORMAT_6.get(key, key): value for key, value in entry.items()}

        self.meta = {**today(self.meta), "format": 7}
        self.meta["axes"] = stored_axes(self.meta["axes"])
        self.meta["in_flight"] = [today(entry) for entry in self.meta["in_flight"]]
        for names in (self._names, self.meta["state"]["buffers"]):
            for stored in list(names):
                for old, new in _TENSORS_6.items():
                    if stored.startswith(old):
                        names[new + stored.removeprefix(old)] = names.pop(stored)

    def _unwrap(self, names: Collection[str]) -> None:
        """Give parameters saved under names of torch's wrappers (dsx 0.2) those of today."""
        if not names:
            return
        parameters = [p for fragment in self.meta["kinds"]["parameters"] for p in fragment]
        today: dict[str, str] = {}
        for old in [p[0] for p in parameters if p[0] not in names]:
            once = _WRAPPERS.sub("", old)
            for new in (once, _WRAPPERS.sub("", once)):
                if new in names:
                    today.setdefault(old, new)
        if not today:
            return
        for parameter in parameters:
            parameter[0] = today.get(parameter[0], parameter[0])
        for fragment in [*self.meta["layout"], *self.meta["wire"]]:
            for slot in fragment["slots"]:
                slot["name"] = today.get(slot["name"], slot["name"])
        for stored in (self._names, self.meta["state"]["buffers"]):
            for old in list(stored):
                found = _OF_PARAMETER.fullmatch(old)
                if found is not None and found[2] in today:
                    stored[found[1] + today[found[2]] + found[3]] = stored.pop(old)

    def slots(self, kind: str, fragment: int) -> tuple[Slot, ...]:
        """Return the layout of a fragment: `kind` is "layout" (as masters lie) or "wire"."""
        entries = self.meta[kind][fragment]["slots"]
        return in_a_row([Slot(e["name"], tuple(e["shape"]), 0, e["start"]) for e in entries])


def _of_format_8(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return what dsx 0.2 has not written: its checkpoints waited for all that was under way."""
    launches = list(meta["history"].get("launches", ()))
    entries: list[dict[str, Any]] = []
    for entry in reversed(meta["in_flight"]):
        if entry["is_empty"]:
            entries.append(entry)
            continue
        round = 0
        if launches:
            round = launches[entry["fragment"]]
            launches[entry["fragment"]] -= 1
        told = {"number": 0, "round": round, "has_arrived": True, "can_redo": False}
        told |= {key: entry["parity"].get(key, 0) for key in ("is_idle", "anchor")}
        entries.append({**entry, **told, "is_finite": True})
    return {"in_flight": entries[::-1], "last": [], "left_at": None, "is_of_own_step": False}


class SavedCluster:
    """The files of one cluster's tag, every one of which must be there and of the same save.

    With a `stage`, only those of its ranks are opened; `names` as of a `SavedRank`.
    """

    def __init__(
        self, directory: Path, stage: Stage | None = None, names: Collection[str] = ()
    ) -> None:
        self.directory = directory
        self._names = names
        self._stage = None if stage is None else [stage.index, stage.count]
        self._first = SavedRank(rank_file(directory, 0), names)
        self.num_ranks: int = self._first.meta["rank_info"]["world_size"]
        self.num_clusters: int = self._first.meta["rank_info"]["num_clusters"]
        first = self._first.meta
        self.members: list[int] = first.get("members", list(range(self.num_clusters)))
        self.has_average: bool = self._first.meta["engine_holds"] == "average"  # in its own files
        for rank in range(self.num_ranks):
            if not rank_file(directory, rank).exists():
                raise FileNotFoundError(
                    f"no outer state at {rank_file(directory, rank)}: the checkpoint has "
                    f"{self.num_ranks} ranks, and the file of this one is gone"
                )

    def rank(self, rank: int) -> SavedRank:
        """Open one rank's file; ValueError if another run or step has written it."""
        found = SavedRank(rank_file(self.directory, rank), self._names)
        for key in ("session", "step"):
            if found.meta[key] != self._first.meta[key]:
                raise ValueError(
                    f"{found.path} is of another save: {key} is {found.meta[key]!r} there and "
                    f"{self._first.meta[key]!r} in {self._first.path.name}"
                )
        return found

    def ranks(self) -> list[SavedRank]:
        """Open the files of all ranks of the stage; ValueError if there are none."""
        opened = [self.rank(rank) for rank in range(self.num_ranks)]
        found = [rank for rank in opened if self._is_wanted(rank)]
        if not found:
            raise ValueError(
                f"{self.directory} holds no rank of pipeline stage {self._stage}: resume with the "
                "same number of stages"
            )
        return found

    def reference(self, rank: int) -> SavedRank:
        """Return the file of a rank with this number, else the first of its stage."""
        if rank < self.num_ranks:
            found = self.rank(rank)
            if self._is_wanted(found):
                return found
        return self.ranks()[0]

    def _is_wanted(self, rank: SavedRank) -> bool:
        return self._stage in (None, rank.meta["kinds"]["stage"])


@dataclass(frozen=True)
class ShardRange:
    """The elements `first`.. of a flattened parameter that lie at `offset` in a vector."""

    name: str
    first: int
    numel: int
    offset: int


@dataclass(frozen=True)
class Source:
    """A saved vector: what lies in it, and how to read elements start..stop of it."""

    shard_ranges: Sequence[ShardRange]
    read: Callable[[int, int], Tensor]


def shard_ranges(
    slots: Sequence[Slot], start: int = 0, stop: int | None = None
) -> list[ShardRange]:
    """Return what lies in the elements start..stop of a vector, with offsets from `start`."""
    found: list[ShardRange] = []
    for slot in slots:
        low = max(slot.offset, start)
        high = slot.offset + slot.numel
        high = high if stop is None else min(high, stop)
        if high > low:
            first = slot.start + low - slot.offset
            found.append(ShardRange(slot.name, first, high - low, low - start))
    return found


def put_together(wanted: Sequence[ShardRange], out: Tensor, sources: Sequence[Source]) -> int:
    """Fill `out` from overlapping pieces, in place; return how many elements nobody has.

    Those keep their value. Sources do not overlap each other.
    """
    by_name: dict[str, list[tuple[ShardRange, Source]]] = {}
    for source in sources:
        for shard_range in source.shard_ranges:
            by_name.setdefault(shard_range.name, []).append((shard_range, source))
    missing = 0
    for target in wanted:
        missing += target.numel
        for shard_range, source in by_name.get(target.name, ()):
            low = max(target.first, shard_range.first)
            high = min(target.first + target.numel, shard_range.first + shard_range.numel)
            if high > low:
                place = target.offset + low - target.first
                begin = shard_range.offset + low - shard_range.first
                out[place : place + high - low].copy_(source.read(begin, begin + high - low))
                missing -= high - low
    return missing


def vector_sources(ranks: Sequence[SavedRank], kind: str, fragment: int, name: str) -> list[Source]:
    """Return a vector of a fragment, as all ranks of the cluster have saved it."""
    return [
        Source(
            shard_ranges(rank.slots(kind, fragment)),
            lambda start, stop, rank=rank: rank.read(name, start, stop),
        )
        for rank in ranks
        if name in rank
    ]


def error_sources(ranks: Sequence[SavedRank], fragment: int, is_of_mean: bool) -> list[Source]:
    """Return the residuals of a fragment, of values sent or of means, in fp32."""
    found: list[Source] = []
    for rank in ranks:
        slots = rank.slots("wire", fragment)
        for name, entry in rank.meta["codec_errors"][fragment].items():
            full_name = f"codec.{name}/{fragment}"
            if entry["is_of_mean"] == is_of_mean and full_name in rank:
                read = partial(
                    read_part,
                    partial(rank.read, full_name),
                    entry["stop"] - entry["start"],
                    entry["storage"],
                )
                found.append(Source(shard_ranges(slots, entry["start"], entry["stop"]), read))
    return found


def first_difference(ours: Any, theirs: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Return `(path, our value, their value)` where two plain structures first differ."""
    return next(differences(ours, theirs, path), None)


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield `(path, our value, their value)` wherever two plain structures differ."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in [*ours, *(k for k in theirs if k not in ours)]:
            yield from differences(ours.get(key), theirs.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(ours, list) and isinstance(theirs, list):
        for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            yield from differences(a, b, f"{path}[{index}]")
        if len(ours) != len(theirs):
            yield f"the length of {path}", len(ours), len(theirs)
    else:
        are_nan = ours != ours and theirs != theirs
        if ours != theirs and not are_nan:
            yield path, ours, theirs
