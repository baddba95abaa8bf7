"""What DeepSpeed is given in a dry run: a model's names and shapes, whole or as a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dsx.core.types import ParameterShape, Stage
from dsx.plan.deepspeed_layers import TIED, pipeline_layers
from dsx.plan.gpt_shapes import GPT
from dsx.plan.model_files import Cluster


class Shapes(nn.Module):
    """Parameters of a model's names and shapes, of the type that the engine would make them."""

    def __init__(self, shapes: Sequence[ParameterShape], dtype: torch.dtype) -> None:
        super().__init__()
        for shape in shapes:
            *path, name = shape.name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            weight = nn.Parameter(torch.empty(shape.shape, dtype=dtype))
            module.register_parameter(name, weight)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Shapes:
        return self  # type and place are right already, and fakes cannot be converted


class TransformerLayer(Shapes):
    """One that "type:transformer" counts."""


def module_of(model: GPT, cluster: Cluster, dtype: torch.dtype) -> Any:
    """Return this rank's module: all of the model, or DeepSpeed's own pipeline of its layers."""
    if cluster.partition is None:
        return Shapes(model.stage(Stage()), dtype)
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    class Pipeline(PipelineModule):
        def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Pipeline:
            return self  # as its layers

    specs: list[Any] = []
    for layer in pipeline_layers(model):
        shapes = [weight.on((0, 1)) for weight in layer.weights]
        kind = Shapes if layer.transformer is None else TransformerLayer
        if layer.is_tied:
            names = [shape.name for shape in shapes]
            specs.append(TiedLayerSpec(TIED, kind, shapes, dtype, tied_weight_attr=names))
        else:
            specs.append(LayerSpec(kind, shapes, dtype))
    return Pipeline(specs, num_stages=cluster.pipeline, partition_method=cluster.partition)
