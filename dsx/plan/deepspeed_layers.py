"""A GPT as the layers of a DeepSpeed `PipelineModule`, and which of its stages each lies on.

The layers are the word embedding, learned positions, each transformer layer, the final norm, and
the head, every one named by its place in the pipeline, as DeepSpeed does. A head that is tied is
the embedding's layer again (`TiedLayerSpec`): its weight belongs to the first stage, and lies on
the last one, too, before all that stage has of its own.

Stages are cut by DeepSpeed's rules (0.19): "uniform", equal numbers of layers, the first stages
taking what is left over; "parameters", the default, of which experts count as many as a rank holds;
and "type:transformer". The latter two balance what layers weigh: the least difference between the
heaviest and the lightest stage, of equal cuts that with the largest places, which is found from the
last stage on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from dsx.core.types import Stage
from dsx.plan.deepspeed_experts import named_as_deepspeed
from dsx.plan.gpt_shapes import GPT, Weight

METHODS = ("parameters", "uniform", "type:transformer")
TIED = "embedding"  # the key of the tied layer
_TRANSFORMER = re.compile(r"decoder\.layers\.(\d+)\.")


class PipelineLayer(NamedTuple):
    """One layer: its weights, named within it; `transformer` is its number among those, else None.

    `is_tied`: it is the tied embedding, first or last.
    """

    weights: tuple[Weight, ...]
    transformer: int | None = None
    is_tied: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether some of its weights are experts'."""
        return any(weight.is_expert for weight in self.weights)

    def numel(self, expert: int = 1) -> int:
        """Return the elements of its weights on a rank, experts lying over so many ranks."""
        numels = [(weight.is_expert, math.prod(weight.shape)) for weight in self.weights]
        experts = sum(numel for is_expert, numel in numels if is_expert)
        return sum(numel for is_expert, numel in numels if not is_expert) + experts // expert


@lru_cache(maxsize=8)
def pipeline_layers(model: GPT) -> tuple[PipelineLayer, ...]:
    """Return the layers of the whole pipeline, in order."""
    found: dict[str, list[Weight]] = {}
    for weight in named_as_deepspeed(model.weights(Stage())):
        match = _TRANSFORMER.match(weight.name)
        module = match[0] if match else weight.name.rpartition(".")[0] + "."
        found.setdefault(module, []).append(replace(weight, name=weight.name[len(module) :]))
    layers: list[PipelineLayer] = []
    for module, weights in found.items():
        match = _TRANSFORMER.match(module)
        number = int(match[1]) if match else None
        layers.append(PipelineLayer(tuple(weights), number, model.is_tied and not layers))
    if model.is_tied:
        layers.append(layers[0])
    return tuple(layers)


@lru_cache(maxsize=64)
def cut_layers(model: GPT, count: int, method: str, expert: int = 1) -> tuple[int, ...]:
    """Return where stages begin among the layers, and the end; ValueError for too few layers."""
    layers = pipeline_layers(model)
    if len(layers) < count:
        raise ValueError(
            f"pipeline.stages={count}: the model has {len(layers)} layers for a pipeline, "
            f"embedding, final norm and head among them; use {len(layers)} stages or fewer"
        )
    if method == "uniform":
        return tuple(_uniform(len(layers), count))
    weighed = [layer.numel(expert) for layer in layers]
    if method != "parameters":
        weighed = [int(layer.transformer is not None) for layer in layers]
    return tuple(_balanced(weighed, count))


def layers_of_stage(
    model: GPT, stage: Stage, method: str, expert: int = 1
) -> list[tuple[int, PipelineLayer]]:
    """Return a stage's layers, each with its place in the pipeline; experts over so many ranks."""
    cuts = cut_layers(model, stage.count, method, expert)
    places = range(cuts[stage.index], cuts[stage.index + 1])
    return [(place, pipeline_layers(model)[place]) for place in places]


def weights_of_stage(model: GPT, stage: Stage, method: str, expert: int = 1) -> list[Weight]:
    """Return a stage's weights in the module's order, a copy of tied ones left out."""
    layers = layers_of_stage(model, stage, method, expert)
    layers.sort(key=lambda pair: not pair[1].is_tied)  # as DeepSpeed's module has them
    return [
        replace(weight, name=_name(place, layer, weight))
        for place, layer in layers
        for weight in layer.weights
        if not (layer.is_tied and place)
    ]


def copies_on_stage(model: GPT, stage: Stage, method: str, expert: int = 1) -> list[Weight]:
    """Return the tied weights on a stage that belong to the first one."""
    return [
        replace(weight, name=_name(place, layer, weight))
        for place, layer in layers_of_stage(model, stage, method, expert)
        for weight in layer.weights
        if layer.is_tied and place and stage.index
    ]


def _name(place: int, layer: PipelineLayer, weight: Weight) -> str:
    return f"tied_modules.{TIED}.{weight.name}" if layer.is_tied else f"{place}.{weight.name}"


def _uniform(count: int, stages: int) -> list[int]:
    size, left = divmod(count, stages)
    return [stage * size + min(stage, left) for stage in range(stages + 1)]


def _balanced(weighed: Sequence[int], stages: int) -> list[int]:
    """Return the cuts with the least spread of what stages weigh, by stages and layers so far."""
    sums = [0, *accumulate(weighed)]
    # layers so far: spread, heaviest, lightest, the cut before
    best: dict[int, tuple[float, float, float, int]] = {0: (0.0, 0.0, math.inf, 0)}
    rows: list[dict[int, tuple[float, float, float, int]]] = []
    for stage in range(1, stages + 1):
        row: dict[int, tuple[float, float, float, int]] = {}
        for end in range(stage, len(weighed) + 1):
            for start, (_, heaviest, lightest, _) in best.items():
                if start >= end:
                    break
                own = sums[end] - sums[start]
                most, least = max(heaviest, own), min(lightest, own)
                if end not in row or most - least <= row[end][0]:
                    row[end] = (most - least, most, least, start)
        rows.append(row)
        best = row
    cuts = [len(weighed)]
    for row in reversed(rows):
        cuts.append(row[cuts[-1]][3])
    return cuts[::-1]
