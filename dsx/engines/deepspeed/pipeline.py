"""DeepSpeed's pipelines: which stage a rank serves, and the weights tied between stages.

Each stage is synchronised on its own, with its peers of the same stage in the other clusters: its
fragments hold its own layers, and what its ranks decide and agree stays among them.

A tied weight lies on several stages, which DeepSpeed keeps together by summing its gradients; it
belongs to the first of them, which broadcasts it (tied_weights.py).

Parameters are named by the layer's index in the whole pipeline, as DeepSpeed does. What a tied
layer holds beside its tied weights is each stage's own, and named so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from dsx.core.types import Stage
from dsx.engines.cluster_collectives import new_groups
from dsx.engines.deepspeed.private import layers_of
from dsx.engines.tied_weights import TiedWeight

OF_STAGE = "stage_"  # begins the names of what a tied layer holds beside its tied weights


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
    for index, layer in enumerate(layers_of(module)):
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


def find_tied_weights(engine: Any, parameters: Mapping[str, Any]) -> list[TiedWeight]:
    """Return the tied weights of this rank's stage, none without a pipeline.

    Collective in the cluster: it makes the process groups.
    """
    if not engine.pipeline_parallelism:
        return []
    found: list[TiedWeight] = []
    module, stage = engine.module, engine.stage_id
    names = {id(p): name for name, p in parameters.items()}
    for key, stages in _tied_stages(module).items():
        if len(stages) > 1:
            ranks = [r for s in stages for r in module.topology().filter_match(pipe=s)]
            groups = new_groups(ranks)
            weights = _tied_weights(module, key) if stage in stages else []
            found += [
                TiedWeight(names[id(w)], w.numel(), *groups, stage == stages[0])
                for w in weights
                if id(w) in names
            ]
    return found


def _tied_stages(module: Any) -> dict[str, list[int]]:
    """Return the stages that hold each tied layer, by key, in the same order on every rank."""
    from deepspeed.runtime.pipe.module import TiedLayerSpec

    stages: dict[str, set[int]] = {}
    for index, layer in enumerate(layers_of(module)):
        if isinstance(layer, TiedLayerSpec):
            stages.setdefault(str(layer.key), set()).add(module.stage_owner(index))
    return {key: sorted(stages[key]) for key in sorted(stages)}


def _tied_weights(module: Any, key: str) -> list[Any]:
    """Return the weights of a tied layer on this stage whose gradients DeepSpeed sums."""
    layer = module.tied_modules[key]
    return [attrgetter(name)(layer) for name in module.tied_weight_attrs[key]]
