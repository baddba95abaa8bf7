"""Which ranks of a DeepSpeed cluster hold what: names that say the same on every rank of them all.

Data- and sequence-parallel ranks hold the same parameters, or ZeRO's shards of them. An expert of
DeepSpeed's MoE is held by its expert-data-parallel ranks alone, of its stage in a pipeline:
DeepSpeed counts experts on each rank from 0, and here they have their number in the layer, as in
its checkpoints. A slice that
AutoTP has cut is a parameter of its own, `<name>.slice_<tensor-parallel rank>`; what the ranks of
a tensor-parallel group hold alike has its plain name, and belongs to the first one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from dsx.core.types import ParameterShape
from dsx.engines.cluster_collectives import gather_objects
from dsx.engines.deepspeed.parameters import is_expert, is_slice, whole_shape
from dsx.engines.deepspeed.private import expert_data_parallel_group, expert_parallel_group
from dsx.engines.masters import dtype_name

_EXPERT = re.compile(r"^(.*\bdeepspeed_experts\.)(\d+)(\..+)$")


@dataclass(frozen=True)
class Layout:
    """What this rank holds of what the ranks of `group`, its stage's, train together.

    `parameters` are its own, by name; `shapes` those of all ranks, in one order; `experts` the
    names of its experts by the name of DeepSpeed's group; `alike` the names that tensor-parallel
    ranks hold alike, where there are several.
    """

    group: Any
    parameters: Mapping[str, Any]
    shapes: Sequence[ParameterShape]
    experts: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    alike: frozenset[str] = frozenset()
    tensor_group: Any = None

    @property
    def is_first_of_alike(self) -> bool:
        """Whether what tensor-parallel ranks hold alike is this rank's."""
        return self.tensor_group is None or dist.get_rank(self.tensor_group) == 0

    def sets_alike(self, names: Sequence[str], dense_group: Any) -> list[tuple[list[str], Any]]:
        """Return `names` in sets, each with the group of the ranks that hold it alike."""
        of_experts = {name for held in self.experts.values() for name in held}
        sets = [([name for name in names if name not in of_experts], dense_group)]
        for of_group, held in sorted(self.experts.items()):
            members = set(held)
            own = [name for name in names if name in members]
            sets.append((own, expert_data_parallel_group(of_group)))
        return sets

    def facts(self) -> dict[str, Any]:
        """Return the place of this rank among slices and experts: the same in all clusters."""
        facts: dict[str, Any] = {}
        if self.tensor_group is not None:
            group = self.tensor_group
            facts["tensor_parallel"] = [dist.get_rank(group), dist.get_world_size(group)]
        for name in sorted(self.experts):
            group = expert_parallel_group(name)
            facts[name] = [dist.get_rank(group), dist.get_world_size(group)]
        return facts


def read_layout(engine: Any, parameters: Mapping[str, Any]) -> Layout:
    """Return what this rank and its stage train. Collective in the stage where ranks differ.

    `parameters` by names that tell the layers of all stages apart. ValueError for experts whose
    number cannot be told, for slices of several sizes, and where ranks train different parameters.
    """
    shapes = [ParameterShape(n, whole_shape(p), dtype_name(p)) for n, p in parameters.items()]
    plain = Layout(engine.seq_data_parallel_group, dict(parameters), shapes)
    if engine.autotp_size() > 1:
        return _with_slices(plain)
    if any(is_expert(p) for p in parameters.values()):
        return _with_experts(plain)
    return plain


def _with_experts(plain: Layout) -> Layout:
    """Return the layout with experts by their number in the layer, in that order."""
    numbers: dict[str, set[str]] = {}  # of a layer's experts on this rank
    for name in plain.parameters:
        if found := _EXPERT.match(name):
            numbers.setdefault(found[1], set()).add(found[2])
    named: dict[str, Any] = {}
    experts: dict[str, list[str]] = {}
    shapes: list[ParameterShape] = []
    of_layer: dict[str, list[tuple[int, str, ParameterShape]]] = {}
    places: dict[str, int] = {}  # of a layer's experts among `shapes`
    for (name, parameter), shape in zip(plain.parameters.items(), plain.shapes, strict=True):
        if not is_expert(parameter):
            named[name] = parameter
            shapes.append(shape)
            continue
        prefix, number, rest = _numbered(name)
        held = len(numbers[prefix])
        group = expert_parallel_group(parameter.group_name)
        rank, count = dist.get_rank(group), dist.get_world_size(group)
        own = f"{prefix}{rank * held + number}{rest}"
        named[own] = parameter
        experts.setdefault(parameter.group_name, []).append(own)
        places.setdefault(prefix, len(shapes))
        of_layer.setdefault(prefix, []).extend(
            (r * held + number, rest, replace(shape, name=f"{prefix}{r * held + number}{rest}"))
            for r in range(count)
        )
    for prefix in reversed(places):
        numbered = sorted(of_layer[prefix], key=lambda entry: entry[0])  # else as in the module
        shapes[places[prefix] : places[prefix]] = [shape for *_, shape in numbered]
    _require_same_shapes(shapes, plain.group)
    return replace(plain, parameters=named, shapes=shapes, experts=experts)


def _numbered(name: str) -> tuple[str, int, str]:
    found = _EXPERT.match(name)
    if found is None:
        raise ValueError(
            f"{name} is marked as an expert's (allreduce=False), and is not of a "
            "deepspeed.moe.layer.MoE, whose experts are deepspeed_experts.<number>: dsx cannot "
            "tell which expert it is; use DeepSpeed's MoE layer"
        )
    return found[1], int(found[2]), found[3]


def _with_slices(plain: Layout) -> Layout:
    """Return the layout with a name for each tensor-parallel rank's slice."""
    from deepspeed.utils import groups

    group: Any = groups.get_tensor_model_parallel_group()
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    named: dict[str, Any] = {}
    shapes: list[ParameterShape] = []
    for (name, parameter), shape in zip(plain.parameters.items(), plain.shapes, strict=True):
        if is_slice(parameter):
            named[f"{name}.slice_{rank}"] = parameter
            shapes += [replace(shape, name=f"{name}.slice_{r}") for r in range(count)]
        else:
            named[name] = parameter
            shapes.append(shape)
    require_even_slices(gather_objects(shapes, group))
    alike = frozenset(name for name, p in plain.parameters.items() if not is_slice(p))
    everything = dist.group.WORLD
    return replace(
        plain, group=everything, parameters=named, shapes=shapes, alike=alike, tensor_group=group
    )


def require_even_slices(everyone: Sequence[Sequence[ParameterShape]]) -> None:
    """Raise ValueError unless all tensor-parallel ranks name slices of the same sizes."""
    for other in everyone:
        for ours, theirs in zip(everyone[0], other, strict=True):
            if ours != theirs:
                raise ValueError(
                    f"tensor_parallel.autotp_size={len(everyone)} cuts a parameter into slices of "
                    f"other sizes ({ours.name} {ours.shape}, elsewhere {theirs.shape}), of which "
                    "ZeRO's shards do not match: choose sizes and heads that it divides"
                )


def _require_same_shapes(shapes: Sequence[ParameterShape], group: Any) -> None:
    """Raise ValueError, on all ranks, unless all of a stage train the same. Collective."""
    for rank, other in enumerate(everyone := gather_objects(list(shapes), group)):
        if other != everyone[0]:
            names = {s.name for s in other} ^ {s.name for s in everyone[0]}
            raise ValueError(
                f"ranks 0 and {rank} of this cluster do not train the same parameters "
                f"({sorted(names)[:3]}): freeze the same experts on every rank"
            )
