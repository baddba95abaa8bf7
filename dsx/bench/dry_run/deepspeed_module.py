"""What DeepSpeed is given in a dry run: a model's names and shapes, whole or as a pipeline.

Experts are DeepSpeed's own `MoE` around one of them, and what AutoTP may cut are torch's linear
layers and embeddings, in the model of a Hugging Face class as far as DeepSpeed looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from dsx.core.types import ParameterShape, Stage
from dsx.plan.autotp_rules import HUGGING_FACE
from dsx.plan.autotp_weights import EMBEDDING, HEAD, POSITIONS
from dsx.plan.deepspeed_experts import NUMBERED
from dsx.plan.deepspeed_layers import TIED, pipeline_layers
from dsx.plan.gpt_shapes import GPT, Weight
from dsx.plan.model_files import Cluster
from dsx.plan.stage_weights import stage_weights

_MIXTURE = ".deepspeed_moe."


class Mixtures:
    """How a model's layers of experts are made on each of `ranks`."""

    def __init__(self, model: GPT, ranks: int) -> None:
        self._model, self._ranks = model, ranks

    def make(self, expert: Sequence[ParameterShape], dtype: torch.dtype) -> nn.Module:
        """Return one around an expert of these shapes."""
        from deepspeed.moe.layer import MoE

        experts = self._model.experts
        assert experts is not None
        one = Expert(expert, dtype)
        return MoE(self._model.hidden, one, experts.count, self._ranks, k=experts.top)


class Shapes(nn.Module):
    """Parameters of a model's names and shapes, of the type that the engine would make them."""

    def __init__(
        self,
        shapes: Sequence[ParameterShape],
        dtype: torch.dtype,
        mixtures: Mixtures | None = None,
    ) -> None:
        super().__init__()
        for shape in shapes:
            if _MIXTURE in shape.name:
                self._add_mixture(shape, shapes, dtype, mixtures)
                continue
            path, _, name = shape.name.rpartition(".")
            weight = nn.Parameter(torch.empty(shape.shape, dtype=dtype))
            self._at(path).register_parameter(name, weight)

    def _at(self, path: str) -> nn.Module:
        """Return the module of a path, made where it is not there."""
        module: nn.Module = self
        for part in path.split(".") if path else []:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        return module

    def _add_mixture(
        self,
        shape: ParameterShape,
        shapes: Sequence[ParameterShape],
        dtype: torch.dtype,
        mixtures: Mixtures | None,
    ) -> None:
        """Make a layer of experts where its first weight, the gate's, comes."""
        path = shape.name.split(_MIXTURE)[0]
        parent, _, name = path.rpartition(".")
        if name in dict(self._at(parent).named_children()):
            return
        assert mixtures is not None
        first = f"{path}{_MIXTURE}experts.{NUMBERED}0."
        expert = [replace(s, name=s.name[len(first) :]) for s in shapes if s.name.startswith(first)]
        with _made_as(dtype):  # the gate, which DeepSpeed makes
            self._at(parent).add_module(name, mixtures.make(expert, dtype))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Shapes:
        return self  # type and place are right already, and fakes cannot be converted


class Expert(Shapes):
    """What DeepSpeed copies for each expert of a rank; made anew, as fakes cannot be copied."""

    def __init__(self, shapes: Sequence[ParameterShape], dtype: torch.dtype) -> None:
        super().__init__(shapes, dtype)
        self._made_of = (shapes, dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Expert:
        return Expert(*self._made_of)


class TransformerLayer(Shapes):
    """One that "type:transformer" counts."""


class Sliceable(Shapes):
    """A whole model of linear layers and embeddings, by the names of a Hugging Face decoder."""

    def __init__(self, weights: Sequence[Weight], model: GPT, dtype: torch.dtype) -> None:
        super().__init__([], dtype)
        self.config = SimpleNamespace(
            num_attention_heads=model.heads,
            num_key_value_heads=model.groups,
            hidden_size=model.hidden,
        )
        self._tp_plan = dict(HUGGING_FACE)
        names = {weight.name for weight in weights}
        with _made_as(dtype):
            for weight in weights:
                path, _, name = weight.name.rpartition(".")
                if len(weight.shape) == 2:
                    parent, _, last = path.rpartition(".")
                    matrix = _matrix(path, weight.shape, f"{path}.bias" in names)
                    self._at(parent).add_module(last, matrix)
                elif not isinstance(self._at(path), nn.Linear):  # those have their bias
                    empty = nn.Parameter(torch.empty(weight.shape, dtype=dtype))
                    self._at(path).register_parameter(name, empty)
            if model.is_tied:
                head = _matrix(HEAD, (model.vocabulary, model.hidden), False)
                self.add_module(HEAD, head)
                head.weight = self.get_submodule(EMBEDDING).weight


def _matrix(path: str, shape: tuple[int, ...], has_bias: bool) -> nn.Module:
    rows, columns = shape
    if path.startswith((EMBEDDING, POSITIONS)):
        return nn.Embedding(rows, columns)
    return nn.Linear(columns, rows, bias=has_bias)


@contextmanager
def _made_as(dtype: torch.dtype) -> Generator[None, None, None]:
    """Let modules make their parameters of a type, as fakes cannot be converted later on."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def module_of(model: GPT, cluster: Cluster, dtype: torch.dtype) -> Any:
    """Return this rank's module: all of the model, or DeepSpeed's own pipeline of its layers."""
    mixtures = Mixtures(model, cluster.expert)
    if cluster.partition is None:
        weights = stage_weights(model, cluster, Stage())
        if cluster.slices is not None:
            return Sliceable(weights, model, dtype)
        return Shapes([weight.on((0, 1)) for weight in weights], dtype, mixtures)
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
            specs.append(LayerSpec(kind, shapes, dtype, mixtures))
    return Pipeline(specs, num_stages=cluster.pipeline, partition_method=cluster.partition)
