"""The weights of a Megatron run as a model without tensor parallelism has them, by its names.

A weight that was cut lies in the files as `<name>.slice_<rank>`. Each slice is the ranks' part of
every run of the weight along the dimension of the cut: one run for most, two where SwiGLU's gate
and up projection lie in one matrix. So runs are put side by side, of each the ranks' parts in
order. Grouped queries, keys and values stay as Megatron interleaves them, group by group, which a
cut never reorders.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsx.checkpoint.averaged_model import SavedModel
from dsx.engines.megatron_model.notes import NOTES, ModelNotes

_EXPERTS = re.compile(r"\.experts\.|\.experts_\d+")
_SLICE = re.compile(r"^(?P<name>.+)\.slice_(?P<rank>\d+)$")


@dataclass(frozen=True)
class JoinedParameter:
    """A whole weight, and the names of its slices in the files, by rank."""

    shape: tuple[int, ...]
    slices: Sequence[str]
    dimension: int = 0
    runs: int = 1


class JoinedModel:
    """A saved model whose slices are joined; tensors are put together when asked for.

    `parameters` are the weights by Megatron's names, in the model's order. ValueError for experts,
    where a slice lacks, or where the notes say nothing of it.
    """

    def __init__(self, saved: SavedModel, notes: ModelNotes) -> None:
        self.saved = saved
        self.notes = notes
        self.aliases: Mapping[str, str] = {}
        self.copies: Mapping[str, str] = {}
        _refuse_experts(saved)
        slices: dict[str, dict[int, str]] = {}
        for stored in saved.parameters:
            match = _SLICE.match(stored)
            name, rank = (match["name"], int(match["rank"])) if match else (stored, -1)
            slices.setdefault(name, {})[rank] = stored
        found = {name: self._parameter(name, of_rank) for name, of_rank in slices.items()}
        self.parameters = dict(sorted(found.items(), key=lambda entry: _place(entry[0])))

    def tensor(self, name: str) -> Tensor:
        """Return one whole weight, fp32, in memory for it and one of its slices."""
        parameter = self.parameters[name]
        if len(parameter.slices) == 1:
            return self.saved.tensor(parameter.slices[0])
        whole = torch.empty(parameter.shape)
        ranks = len(parameter.slices)
        runs = whole.chunk(parameter.runs, parameter.dimension)
        for rank, stored in enumerate(parameter.slices):
            parts = self.saved.tensor(stored).chunk(parameter.runs, parameter.dimension)
            for run, part in zip(runs, parts, strict=True):
                run.chunk(ranks, parameter.dimension)[rank].copy_(part)
        return whole

    def _parameter(self, name: str, of_rank: Mapping[int, str]) -> JoinedParameter:
        stored = [of_rank[rank] for rank in sorted(of_rank)]
        shape = self.saved.parameters[stored[0]].shape
        if -1 in of_rank:
            return JoinedParameter(shape, stored[:1])
        where = self.saved.directory
        if name not in self.notes.cuts:
            raise ValueError(f"{where / NOTES} does not say how {name} is cut: take another tag")
        if sorted(of_rank) != list(range(len(of_rank))):
            raise ValueError(
                f"{where} lacks slices of {name}: it holds {', '.join(stored)}; take another --tag"
            )
        dimension, runs = self.notes.cuts[name]
        whole = list(shape)
        whole[dimension] *= len(stored)
        return JoinedParameter(tuple(whole), stored, dimension, runs)


def _refuse_experts(saved: SavedModel) -> None:
    """Raise ValueError for experts: what a slice of theirs is of, no mark of Megatron's says."""
    if experts := [name for name in saved.parameters if _EXPERTS.search(name)]:
        raise ValueError(
            f"{saved.directory} holds experts, such as {experts[0]}, which are not put together: "
            "use Megatron's own checkpoint, which the end of a run saves with the average in it"
        )


def _place(name: str) -> tuple[int, int]:
    """Return where a weight is in the model: embedding, layers in order, what comes last."""
    if match := re.match(r"decoder\.layers\.(\d+)\.", name):
        return 1, int(match[1])
    return (0, 0) if name.startswith("embedding.") else (2, 0)
