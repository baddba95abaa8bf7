"""Which parameters are synchronised together: fragments of whole layers, sizes, or the model.

Source: Streaming DiLoCo (arXiv:2501.18512, Sec. 2.1): fragments of whole layers, "strided" (layer
l in fragment l mod P, the better one in the paper) or "sequential" (contiguous runs).

A fragmenter assigns *names of whole parameters*, from the model alone, so every rank of every
cluster gets the same answer whatever its shard; `lay_out` then cuts a rank's own pieces to it.
A layer is a run of parameters that share the name up to the first number in it
("decoder.layers.3"); what precedes the first layer (embeddings) joins the first one, what follows
the last (final norm, head) the last.

"auto" is four fragments, or one per layer of a model, or of a pipeline stage, that has fewer:
stages are cut each by itself, and may differ in their numbers. A number that is given is kept to.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Annotated, Literal, Protocol

from annotated_types import Ge

from dsx.core.registry import contract, register
from dsx.core.types import Fragment, ParameterShape, Slot, Stage

MOST_OF_AUTO = 4
_FIRST_NUMBER = re.compile(r"^((?:.*?\.)??\d+)(?:\.|$)")


@contract("fragments")
class Fragmenter(Protocol):
    """Assigns every parameter name to one of `num_fragments` (P) fragments.

    `num_fragments` is None where the model says how many there are, "auto" where it may say fewer
    than `MOST_OF_AUTO`.
    """

    num_fragments: int | Literal["auto"] | None

    @abstractmethod
    def assign(self, parameters: Sequence[ParameterShape]) -> list[list[str]]:
        """Return the names of each fragment, in the order of `parameters`."""
        ...


@register("fragments", "model")
@dataclass(frozen=True)
class WholeModel(Fragmenter):
    """One fragment that holds everything (P = 1)."""

    num_fragments = 1

    def assign(self, parameters: Sequence[ParameterShape]) -> list[list[str]]:
        """Return all names."""
        return [[p.name for p in parameters]]


@register("fragments", "layer")
@dataclass(frozen=True)
class ByLayer(Fragmenter):
    """Whole layers, strided over the fragments or in contiguous runs."""

    num_fragments: Annotated[int, Ge(1)] | Literal["auto"] | None = None
    """The number of fragments (P), at most the layers of the model, or of each pipeline stage;
    "auto": 4, or one per layer where there are fewer; null: one per layer, up to `most`."""
    pattern: Literal["strided", "sequential"] = "strided"
    """Which layers share a fragment: every P-th one (strided), or neighbours (sequential)."""
    most: Annotated[int, Ge(1)] | None = None
    """The largest P where `num_fragments` is null: a model, or a pipeline stage, with more layers
    has several in a fragment; null: no limit. At most H, where fragments leave one by one."""

    def assign(self, parameters: Sequence[ParameterShape]) -> list[list[str]]:
        """Return the names of each fragment; ValueError if there are fewer layers than P."""
        layers = group_by_layer(parameters)
        most = MOST_OF_AUTO if self.num_fragments == "auto" else self.most or len(layers)
        count = min(most, len(layers))
        if isinstance(self.num_fragments, int):
            count = self.num_fragments
        _require_count(count, len(layers), "layers")
        fragments: list[list[str]] = [[] for _ in range(count)]
        for index, names in enumerate(layers):
            strided = index % count
            run = index * count // len(layers)
            fragments[strided if self.pattern == "strided" else run].extend(names)
        return fragments


@register("fragments", "size")
@dataclass(frozen=True)
class BySize(Fragmenter):
    """Contiguous runs of whole parameters with about equal numbers of elements."""

    num_fragments: Annotated[int, Ge(1)]  # pyright: ignore[reportIncompatibleVariableOverride]
    """The number of fragments (P), at most the parameters of the model."""

    def assign(self, parameters: Sequence[ParameterShape]) -> list[list[str]]:
        """Return the names of each fragment; ValueError if there are fewer parameters than P."""
        _require_count(self.num_fragments, len(parameters), "parameters")
        total = sum(p.numel for p in parameters)
        fragments: list[list[str]] = [[]]
        seen = 0
        for index, parameter in enumerate(parameters):
            missing = self.num_fragments - len(fragments)
            is_full = seen * self.num_fragments >= total * len(fragments)
            must_open = len(parameters) - index == missing
            if fragments[-1] and missing and (is_full or must_open):
                fragments.append([])
            fragments[-1].append(parameter.name)
            seen += parameter.numel
        return fragments


def group_by_layer(parameters: Sequence[ParameterShape]) -> list[list[str]]:
    """Group names by numbered layer, in model order; see the module for what joins which.

    A model without numbers in its names has one layer per module.
    """
    keys = [_layer_key(p.name) for p in parameters]
    if all(key is None for key in keys):
        modules: dict[str, list[str]] = {}
        for p in parameters:
            modules.setdefault(p.name.rpartition(".")[0], []).append(p.name)
        return list(modules.values())
    layers: dict[str, list[str]] = {}
    leading: list[str] = []
    for parameter, key in zip(parameters, keys, strict=True):
        if key is not None:
            layers.setdefault(key, []).append(parameter.name)
        elif layers:
            layers[next(reversed(layers))].append(parameter.name)
        else:
            leading.append(parameter.name)
    groups = list(layers.values())
    groups[0] = leading + groups[0]
    return groups


def at_most(fragmenter: Fragmenter, interval: int) -> Fragmenter:
    """Return a fragmenter whose `most`, if it has one and goes by it, is at most H."""
    if not isinstance(fragmenter, ByLayer) or fragmenter.num_fragments is not None:
        return fragmenter
    if fragmenter.most is None or fragmenter.most <= interval:
        return fragmenter
    return replace(fragmenter, most=interval)


def usual_count(fragmenter: Fragmenter) -> int | None:
    """Return how many fragments a model with layers enough is cut into; None if it says."""
    count = fragmenter.num_fragments
    return MOST_OF_AUTO if count == "auto" else count


def fewer_than_usual(fragmenter: Fragmenter, counts: Sequence[int]) -> str | None:
    """Return what to say where "auto" has found fewer layers than `MOST_OF_AUTO`; None elsewhere.

    `counts` are the fragments of each pipeline stage, or of the model.
    """
    few = sorted({count for count in counts if count < MOST_OF_AUTO})
    if fragmenter.num_fragments != "auto" or not few:
        return None
    where = "the model has"
    if len(counts) > 1:
        stages = sum(count < MOST_OF_AUTO for count in counts)
        where = f"{stages} of {len(counts)} pipeline stages have"
    layers = " or ".join(map(str, few)) + (" layer" if few == [1] else " layers")
    return (
        f"fragments.num_fragments='auto': {where} {layers}, and a fragment for each instead of "
        f"{MOST_OF_AUTO}"
    )


def assign_stage(
    fragmenter: Fragmenter, parameters: Sequence[ParameterShape], stage: Stage
) -> list[list[str]]:
    """Return the names of each of a stage's fragments; ValueError if it cannot have them."""
    if stage.count == 1:
        return fragmenter.assign(parameters)
    where = f"pipeline stage {stage.index} of {stage.count}"
    if not parameters:
        raise ValueError(
            f"{where} trains nothing but copies of tied weights; give it a layer of its own "
            "(where the pipeline's layers are laid out)"
        )
    try:
        return fragmenter.assign(parameters)
    except ValueError as error:
        raise ValueError(f"{where}, which is cut into fragments by itself: {error}") from None


def lay_out(
    assignment: Sequence[Sequence[str]],
    pieces: Mapping[str, tuple[tuple[int, ...], int]],
    wholes: Mapping[str, tuple[int, ...]],
    stage: int = 0,
) -> list[Fragment]:
    """Build this rank's fragments from its own pieces, `{name: (shape of the piece, start)}`.

    `wholes` are the shapes of the whole parameters. A name that is missing in `pieces` lies on
    another rank; a fragment may end up empty here. Small parameters come last, so that those
    which are worth a code lie together.
    """
    fragments: list[Fragment] = []
    for index, names in enumerate(assignment):
        own = [Slot(n, pieces[n][0], 0, pieces[n][1], wholes[n]) for n in names if n in pieces]
        large = [slot for slot in own if not slot.is_small]
        small = [slot for slot in own if slot.is_small] if len(large) < len(own) else []
        fragments.append(Fragment(index, stage, in_a_row([*large, *small])))
    return fragments


def in_a_row(slots: Sequence[Slot]) -> tuple[Slot, ...]:
    """Return the slots with offsets one after another."""
    ends = list(accumulate(slot.numel for slot in slots))
    offsets = [0, *ends[:-1]]
    return tuple(
        Slot(s.name, s.shape, offset, s.start, s.whole)
        for s, offset in zip(slots, offsets, strict=False)
    )


@lru_cache(maxsize=2**17)
def _layer_key(name: str) -> str | None:
    match = _FIRST_NUMBER.match(name)
    return match.group(1) if match else None


def _require_count(num_fragments: int, available: int, what: str) -> None:
    if num_fragments < 1:
        raise ValueError(f"fragments.num_fragments={num_fragments} must be at least 1")
    if num_fragments > available:
        raise ValueError(
            f"fragments.num_fragments={num_fragments} exceeds the model's {available} {what}: "
            f"every fragment needs at least one; use num_fragments <= {available}"
        )
