"""The weights of a Megatron run as a model without parallelism has them, by its names.

A weight that was cut lies in the files as `<name>.slice_<rank>`. Each slice is the ranks' part of
every run of the weight along the dimension of the cut: one run for most, two where SwiGLU's gate
and up projection lie in one matrix. So runs are put side by side, of each the ranks' parts in
order. Grouped queries, keys and values stay as Megatron interleaves them, group by group, which a
cut never reorders.

What an expert-parallel rank holds is `<name>.experts_<rank>`, with the number of the expert among
its own. Here experts have their number among all, and all of a GroupedMLP lie in one matrix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dsx.checkpoint.averaged_model import SavedModel
from dsx.engines.megatron_model.experts import KINDS, ExpertName
from dsx.engines.megatron_model.notes import NOTES, ExpertNotes, ModelNotes

_STORED = re.compile(r"^(?P<name>.+?)(\.experts_(?P<expert>\d+))?(\.slice_(?P<rank>\d+))?$")
_EXPERTS = ".experts."
Slices = dict[int, str]  # by tensor-parallel rank; -1 for what is not cut


@dataclass(frozen=True)
class JoinedParameter:
    """A whole weight, and the names of its slices in the files, by rank.

    `view`: how a slice is looked at before it is joined, where that is not as it is saved.
    """

    shape: tuple[int, ...]
    slices: Sequence[str]
    dimension: int = 0
    runs: int = 1
    view: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Stack:
    """A matrix of all of a layer's experts: what each expert-parallel rank has, and of which."""

    shape: tuple[int, ...]
    parts: Sequence[JoinedParameter]  # [experts of the rank, in, out]
    held: Sequence[Sequence[int]]


class JoinedModel:
    """A saved model whose slices are joined; tensors are put together when asked for.

    `parameters` are the weights by Megatron's names, in the model's order. ValueError where a slice
    or an expert lacks, or where the notes say nothing of it.
    """

    def __init__(self, saved: SavedModel, notes: ModelNotes) -> None:
        self.saved = saved
        self.notes = notes
        self.aliases: Mapping[str, str] = {}
        self.copies: Mapping[str, str] = {}
        slices: dict[str, Slices] = {}
        stacks: dict[str, dict[int, Slices]] = {}
        for stored in saved.parameters:
            match = _STORED.match(stored)
            assert match is not None
            name, rank = match["name"], int(match["rank"] or -1)
            if _EXPERTS not in name:
                slices.setdefault(name, {})[rank] = stored
                continue
            expert, own = self._expert(name), int(match["expert"] or 0)
            if expert.number is None:
                stacks.setdefault(name, {}).setdefault(own, {})[rank] = stored
            else:
                whole = expert.with_number(self._held(own)[expert.number])
                slices.setdefault(whole, {})[rank] = stored
        found: dict[str, JoinedParameter | Stack] = {
            name: self._parameter(name, of_rank) for name, of_rank in slices.items()
        }
        found |= {name: self._stack(name, of_expert) for name, of_expert in stacks.items()}
        self._require_all_experts(found)
        self.parameters = dict(sorted(found.items(), key=lambda entry: _place(entry[0])))

    def tensor(self, name: str) -> Tensor:
        """Return one whole weight, fp32, in memory for it and one of its slices."""
        parameter = self.parameters[name]
        if isinstance(parameter, JoinedParameter):
            return self._join(parameter)
        whole = torch.empty(sum(map(len, parameter.held)), *parameter.parts[0].shape[1:])
        for part, held in zip(parameter.parts, parameter.held, strict=True):
            whole[list(held)] = self._join(part)
        return whole.view(parameter.shape)

    def _join(self, parameter: JoinedParameter) -> Tensor:
        if len(parameter.slices) == 1:
            return self._slice(parameter, 0)
        whole = torch.empty(parameter.shape)
        ranks = len(parameter.slices)
        runs = whole.chunk(parameter.runs, parameter.dimension)
        for rank in range(ranks):
            parts = self._slice(parameter, rank).chunk(parameter.runs, parameter.dimension)
            for run, part in zip(runs, parts, strict=True):
                run.chunk(ranks, parameter.dimension)[rank].copy_(part)
        return whole

    def _slice(self, parameter: JoinedParameter, rank: int) -> Tensor:
        stored = self.saved.tensor(parameter.slices[rank])
        return stored if parameter.view is None else stored.view(parameter.view)

    def _parameter(
        self, name: str, of_rank: Slices, view: tuple[int, ...] | None = None
    ) -> JoinedParameter:
        stored = [of_rank[rank] for rank in sorted(of_rank)]
        shape = view or self.saved.parameters[stored[0]].shape
        if list(of_rank) == [-1]:
            return JoinedParameter(shape, stored[:1], view=view)
        where = self.saved.directory
        if sorted(of_rank) != list(range(len(of_rank))):
            raise ValueError(
                f"{where} lacks slices of {name}: it holds {', '.join(stored)}; take another --tag"
            )
        dimension, runs = self._cut(name)
        whole = list(shape)
        whole[dimension] *= len(stored)
        return JoinedParameter(tuple(whole), stored, dimension, runs, view)

    def _cut(self, name: str) -> tuple[int, int]:
        """Return how a weight is cut; of an expert's as of those that each rank has."""
        expert = ExpertName.of(name)
        if expert is not None and expert.number is not None:
            own = [
                held.index(expert.number) for held in self._experts.held if expert.number in held
            ]
            name = expert.with_number(own[0])
        if name not in self.notes.cuts:
            where = self.saved.directory / NOTES
            raise ValueError(f"{where} does not say how {name} is cut: take another tag")
        return self.notes.cuts[name]

    def _stack(self, name: str, of_expert: dict[int, Slices]) -> Stack:
        expert, held = self._expert(name), self._experts.held
        if sorted(of_expert) != list(range(len(held))):
            raise ValueError(
                f"{self.saved.directory} holds {name} of the expert-parallel ranks "
                f"{sorted(of_expert)}, of {len(held)}; take another --tag"
            )
        parts: list[JoinedParameter] = []
        for own, slices in sorted(of_expert.items()):
            stored = self.saved.parameters[next(iter(slices.values()))].shape
            parts.append(self._parameter(name, slices, expert.as_stack(len(held[own]), stored)))
        count, rows, columns = self._experts.count, *parts[0].shape[1:]
        is_first = expert.linear == "linear_fc1"
        shape = (rows, count * columns) if is_first else (count * rows, columns)
        return Stack(shape, parts, held)

    @cached_property
    def _experts(self) -> ExpertNotes:
        """What is noted of experts; ValueError where nothing is."""
        notes, where = self.notes.experts, self.saved.directory
        if notes is None:
            raise ValueError(
                f"{where} holds experts, and {where / NOTES}, of an earlier dsx, does not say how "
                "they lie: go on from it with this dsx and save it again, or use Megatron's own "
                "checkpoint, which the end of a run saves with the average in it"
            )
        if sorted(number for held in notes.held for number in held) != list(range(notes.count)):
            raise ValueError(
                f"{where / NOTES}: expert-parallel ranks hold experts {list(notes.held)}, and dsx "
                "puts together those of which each rank has its own; take Megatron's own checkpoint"
            )
        return notes

    def _held(self, rank: int) -> Sequence[int]:
        held = self._experts.held
        if rank >= len(held):
            raise ValueError(
                f"{self.saved.directory} holds experts of expert-parallel rank {rank}, and its "
                f"{NOTES} tells of {len(held)} ranks: take another --tag"
            )
        return held[rank]

    def _expert(self, name: str) -> ExpertName:
        expert = ExpertName.of(name)
        strange = [kind for kind in self._experts.kinds if kind not in KINDS]
        if expert is None or strange:
            raise ValueError(
                f"{self.saved.directory} holds {name}, of {', '.join(self._experts.kinds)}, and "
                f"dsx knows the experts of {', '.join(KINDS)}: use Megatron's own checkpoint, "
                "which the end of a run saves with the average in it"
            )
        return expert

    def _require_all_experts(self, found: Mapping[str, object]) -> None:
        """Raise ValueError where a layer has a parameter of some experts and not of others."""
        experts = [e for e in map(ExpertName.of, found) if e is not None and e.number is not None]
        for expert in {replace(expert, number=0) for expert in experts}:
            for number in range(self._experts.count):
                if (lacking := expert.with_number(number)) not in found:
                    raise ValueError(f"{self.saved.directory} lacks {lacking}; take another --tag")


def _place(name: str) -> tuple[int, int]:
    """Return where a weight is in the model: embedding, layers in order, what comes last."""
    if match := re.match(r"decoder\.layers\.(\d+)\.", name):
        return 1, int(match[1])
    return (0, 0) if name.startswith("embedding.") else (2, 0)
