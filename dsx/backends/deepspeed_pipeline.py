"""DeepSpeed's pipelines: which stage a rank serves, and weights that several stages hold (ties).

Each stage is synchronised on its own, with its peers of the same stage in the other clusters: its
fragments hold its own layers, and what its ranks decide and agree stays among them.

A tied weight lies on several stages, which DeepSpeed keeps together by summing its gradients. It
belongs to the first of them: it is in a fragment there and nowhere else, so it travels once and is
decided upon once. At every step boundary the owner tells the other stages, in one number per
weight, whether it has written it, and hands it on bit for bit if so. (The same transfer on every
stage would travel several times, and the copies would come apart where stages decide differently,
from measured times, or code differently, their shards being cut at other places.)

Parameters are named by the layer's index in the whole pipeline, as DeepSpeed does. What a tied
layer holds beside its tied weights is each stage's own, and named so.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.backends.base import Piece
from dsx.fragment import Fragmenter
from dsx.types import ParameterShape, Stage

OF_STAGE = "stage_"  # begins the names of what a tied layer holds beside its tied weights
_CHUNK = 1 << 24  # elements handed on at a time


def stage_of(engine: Any) -> Stage:
    """Return the pipeline stage that this rank serves."""
    if not engine.pipeline_parallelism:
        return Stage()
    return Stage(engine.stage_id, engine.num_stages)


def name_in_model(engine: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters by names that no other stage gives to another parameter."""
    if not engine.pipeline_parallelism:
        return dict(parameters)
    module = engine.module
    first = {key: stages[0] for key, stages in _tied_stages(module).items()}
    tied = {id(weight) for key in module.tied_modules for weight in _tied_weights(module, key)}

    def unique(name: str, parameter: Any) -> str:
        parts = name.split(".")
        is_of_tied_layer = parts[0] == "tied_modules" and id(parameter) not in tied
        if is_of_tied_layer and first[parts[1]] != engine.stage_id:
            return f"{OF_STAGE}{engine.stage_id}.{name}"
        return name

    return {unique(name, p): p for name, p in parameters.items()}


def describe_layers(engine: Any) -> dict[str, Any]:
    """Return what tells the tensors of DeepSpeed's layer files apart, of all stages.

    `places`: what begins the names of a tied layer's tensors, by its place in the pipeline;
    `tied`: the names of tied weights, with the stages that hold them.
    """
    from deepspeed.runtime.pipe.module import TiedLayerSpec

    if not engine.pipeline_parallelism:
        return {}
    module = engine.module
    stages, places, tied = _tied_stages(module), dict[str, str](), dict[str, list[int]]()
    for index, layer in enumerate(module._layer_specs):
        if isinstance(layer, TiedLayerSpec):
            key, stage = str(layer.key), module.stage_owner(index)
            own = f"{OF_STAGE}{stage}." if stage != stages[key][0] else ""
            places[str(index)] = f"{own}tied_modules.{key}"
            attributes: Any = layer.tied_weight_attr
            attributes = [attributes] if isinstance(attributes, str) else attributes
            tied.update({f"tied_modules.{key}.{name}": stages[key] for name in attributes})
    return {"places": places, "tied": tied}


def mark_replicas(engine: Any) -> dict[str, Any]:
    """Return what lets DeepSpeed's universal converter take tied weights from one stage only.

    It knows weights of stage 0 that others repeat, and no others.
    """
    from deepspeed.checkpoint import constants

    tied = describe_layers(engine).get("tied", {})
    names = [name for name, stages in tied.items() if stages[0] == 0 and len(stages) > 1]
    if not names:
        return {}
    info = {
        constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        constants.PIPELINE_REPLICATED_PARAMETER_PATTERNS: [f"{re.escape(n)}$" for n in names],
    }
    return {constants.UNIVERSAL_CHECKPOINT_INFO: info}


def assign_stage(
    fragmenter: Fragmenter, parameters: Sequence[ParameterShape], stage: Stage
) -> list[list[str]]:
    """Return the names of each of this stage's fragments; ValueError if it cannot have them."""
    if stage.count == 1:
        return fragmenter.assign(parameters)
    where = f"pipeline stage {stage.index} of {stage.count}"
    if not parameters:
        raise ValueError(
            f"{where} trains nothing but copies of tied weights; give it a layer of its own "
            "(partition_method of the PipelineModule)"
        )
    try:
        return fragmenter.assign(parameters)
    except ValueError as error:
        raise ValueError(f"{where}, which is cut into fragments by itself: {error}") from None


@dataclass
class Tie:
    """One tied weight on this rank: the ranks of all its stages, and the piece that lies here."""

    name: str
    numel: int
    group: Any
    is_owner: bool
    fragment: int | None = None  # on its owner
    piece: Piece | None = None

    def pack(self, first: int, out: Tensor) -> None:
        """Write the owner's piece of elements from `first` on into `out`, in place; else zeros."""
        out.zero_()
        piece = self.piece.cut(first, first + out.numel()) if self.piece else None
        if self.is_owner and piece:
            start = piece.start - first
            out[start : start + piece.numel].copy_(piece.view())

    def unpack(self, first: int, values: Tensor) -> None:
        """Overwrite what lies here of elements from `first` on, in place."""
        piece = self.piece.cut(first, first + values.numel()) if self.piece else None
        if not self.is_owner and piece:
            start = piece.start - first
            piece.view().copy_(values[start : start + piece.numel])


class Ties:
    """The tied weights of this rank's stage; `device` is where collectives take tensors.

    Creating it is collective in the cluster: it makes the process groups.
    """

    def __init__(self, engine: Any, parameters: Mapping[str, Any], device: torch.device) -> None:
        self._device = device
        self._ties: list[Tie] = []
        if not engine.pipeline_parallelism:
            return
        module, stage = engine.module, engine.stage_id
        names = {id(p): name for name, p in parameters.items()}
        for key, stages in _tied_stages(module).items():
            if len(stages) > 1:
                ranks = [r for s in stages for r in module.topology().filter_match(pipe=s)]
                group: Any = dist.new_group(ranks)
                weights = _tied_weights(module, key) if stage in stages else []
                self._ties += [
                    Tie(names[id(w)], w.numel(), group, stage == stages[0])
                    for w in weights
                    if id(w) in names
                ]

    @property
    def replicas(self) -> set[str]:
        """The weights here that belong to another stage."""
        return {tie.name for tie in self._ties if not tie.is_owner}

    def locate(self, assignment: Sequence[Sequence[str]], pieces: Mapping[str, Piece]) -> None:
        """Take note of where this rank's pieces of the tied weights are.

        An element must be in one piece only of all the owner's ranks.
        """
        fragments = {name: index for index, names in enumerate(assignment) for name in names}
        for tie in self._ties:
            tie.fragment = fragments.get(tie.name)
            tie.piece = pieces.get(tie.name)

    def hand_on(self, written: Collection[int]) -> bool:
        """Give the other stages the weights in these fragments; return whether any came here.

        Collective over the stages that share a weight, whatever was written; all ranks of a stage
        get the same answer.
        """
        has_come = False
        for tie in self._ties:
            is_written = tie.is_owner and tie.fragment in written
            flag = torch.tensor([float(is_written)], device=self._device)
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=tie.group)
            if flag.item():
                self._hand_on(tie)
                has_come |= not tie.is_owner
        return has_come

    def _hand_on(self, tie: Tie) -> None:
        """Send a weight from its owner's ranks to all others."""
        buffer = torch.empty(min(_CHUNK, tie.numel), device=self._device)
        for first in range(0, tie.numel, _CHUNK):
            values = buffer[: tie.numel - first]
            tie.pack(first, values)
            # one summand is not zero; as integers, so that every bit stays
            dist.all_reduce(values.view(torch.int32), group=tie.group)
            tie.unpack(first, values)


def _tied_stages(module: Any) -> dict[str, list[int]]:
    """Return the stages that hold each tied layer, by key, in the same order on every rank."""
    from deepspeed.runtime.pipe.module import TiedLayerSpec

    stages: dict[str, set[int]] = {}
    for index, layer in enumerate(module._layer_specs):
        if isinstance(layer, TiedLayerSpec):
            stages.setdefault(str(layer.key), set()).add(module.stage_owner(index))
    return {key: sorted(stages[key]) for key in sorted(stages)}


def _tied_weights(module: Any, key: str) -> list[Any]:
    """Return the weights of a tied layer on this stage whose gradients DeepSpeed sums."""
    layer = module.tied_modules[key]
    return [module._recursive_getattr(layer, name) for name in module.tied_weight_attrs[key]]
