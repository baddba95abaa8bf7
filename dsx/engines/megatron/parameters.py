"""What a Megatron rank trains, by names that say the same on every rank of every cluster.

Layers have their global number (`layer.layer_number - 1`), whichever stage and virtual chunk they
are in, and are in that order, after the embedding and before the final norm and the head; where a
model has an encoder and a decoder, the encoder's come first, and both are on one stage. A model of
other parts (`vision_model`) is served on one stage, by its own names and in its own order. A slice
of a tensor-parallel weight is a parameter of its own, `<name>.slice_<tensor-parallel rank>`; a
parameter that tensor-parallel ranks hold alike has its plain name, and belongs to the first one.

Experts are divided over ranks of their own dimensions (expert, expert tensor, expert data), which
lie across those of the dense layers. What one rank holds of a layer's experts has the number of its
expert-parallel rank in its name, `<name>.experts_<rank>`, and the slice's behind it, if there are
any. Transformer Engine does not mark slices of experts as such: all their parameters are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from megatron.core import num_microbatches_calculator, parallel_state

from dsx.core.types import ParameterShape
from dsx.engines.cluster_collectives import gather_objects
from dsx.engines.masters import dtype_name
from dsx.engines.megatron.fully_sharded import own
from dsx.engines.megatron.router_bias import biases_of

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_LAYER = re.compile(r"^((?:encoder|decoder|mtp)\.layers\.)(\d+)\.")
_EXPERTS = ".experts."  # and not shared_experts, which are dense
_AT_FIRST = ("embedding.", "encoder_relative_pos_emb.", "decoder_relative_pos_emb.")
_BEHIND_LAYERS = ("encoder.final", "decoder.final")
_AT_LAST = ("output_layer.", "lm_head.", "pooler.", "binary_head.")
_FIRST, _BEHIND_ENCODER, _BEHIND_DECODER, _LAST = 0, 1 << 20, 1 << 29, 1 << 30


@dataclass(frozen=True)
class Coordinates:
    """A rank's place in its cluster: number and count along each dimension of parallelism.

    Context-parallel ranks read the same samples, each its part of the sequence, and hold the same
    parameters: to the optimizer they are data-parallel ranks, to the data they are one. The last
    three are the same ranks as experts are divided over them.
    """

    tensor: tuple[int, int]
    pipeline: tuple[int, int]
    data: tuple[int, int]
    context: tuple[int, int] = (0, 1)
    expert: tuple[int, int] = (0, 1)
    expert_tensor: tuple[int, int] = (0, 1)
    expert_data: tuple[int, int] = (0, 1)

    @classmethod
    def read(cls) -> Coordinates:
        """Read them from Megatron's global state."""
        state: Any = parallel_state
        return cls(
            (state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
            (
                state.get_pipeline_model_parallel_rank(),
                state.get_pipeline_model_parallel_world_size(),
            ),
            (state.get_data_parallel_rank(), state.get_data_parallel_world_size()),
            (state.get_context_parallel_rank(), state.get_context_parallel_world_size()),
            (state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
            (
                state.get_expert_tensor_parallel_rank(),
                state.get_expert_tensor_parallel_world_size(),
            ),
            (state.get_expert_data_parallel_rank(), state.get_expert_data_parallel_world_size()),
        )

    def everyone(self) -> list[Coordinates]:
        """Return those of every rank of the cluster, in rank order. Collective."""
        return gather_objects(self)


@dataclass(frozen=True)
class Parameter:
    """One trained parameter of this rank."""

    tensor: Any
    name: str  # of this rank's slice, or of the whole
    plain: str  # without the slice
    is_slice: bool
    is_tied_copy: bool  # of the embedding, on another stage
    is_expert: bool = False

    def is_alike(self) -> bool:
        """Whether tensor-parallel ranks hold it alike, where there are several."""
        return not self.is_slice and not self.is_expert


def name_parameters(
    chunks: Sequence[Any], trained: Sequence[Any], place: Coordinates
) -> list[Parameter]:
    """Return this rank's trained parameters, in the model's order.

    ValueError for parameters whose place in the model is not known, or which the model lacks.
    """
    held = {id(p) for p in trained}
    found: list[tuple[int, Parameter]] = []
    for chunk in chunks:
        module = unwrapped(chunk)
        _require_one_stage_of_two_parts(module, place)
        numbers = _layer_numbers(module)
        is_tied = getattr(module, "share_embeddings_and_output_weights", False)
        predicts_more = _predicts_more_tokens(module, is_tied, place)
        is_copied = is_tied or predicts_more
        every = ((n, own(p)) for n, p in (*module.named_parameters(), *biases_of(module)))
        entries = [(name, tensor) for name, tensor in every if id(tensor) in held]
        is_own = place.pipeline[1] == 1 and not all(_is_known(name) for name, _ in entries)
        for position, (local_name, tensor) in enumerate(entries):
            order, plain = position, local_name
            if not is_own:
                order, plain = _in_model(local_name, numbers, module)
            is_copy = plain == (EMBEDDING if predicts_more else HEAD) and is_copied
            found.append((order, _parameter(tensor, plain, is_copy, place)))
    if len(found) != len(held):
        raise ValueError(
            f"the optimizer trains {len(held)} parameters, {len(found)} of them in the model "
            "chunks: pass all chunks that get_megatron_optimizer was given"
        )
    if len({parameter.name for _, parameter in found}) != len(found):
        raise ValueError("two parameters of the model chunks have the same name and layer number")
    return [parameter for _, parameter in sorted(found, key=lambda entry: entry[0])]


def _parameter(tensor: Any, plain: str, is_copy: bool, place: Coordinates) -> Parameter:
    """Return one parameter with its name; ValueError for an expert's that is reduced otherwise."""
    if _EXPERTS not in plain:
        _require_reduced(tensor, plain, over_experts=False)
        is_slice = place.tensor[1] > 1 and getattr(tensor, "tensor_model_parallel", False)
        name = f"{plain}.slice_{place.tensor[0]}" if is_slice else plain
        return Parameter(tensor, name, plain, is_slice, is_copy)
    _require_reduced(tensor, plain, over_experts=place.expert[1] > 1)
    is_slice = place.expert_tensor[1] > 1
    if is_slice and tensor.dim() < 2:
        raise ValueError(
            f"dsx does not know whether {plain} is the same on all expert-tensor-parallel ranks: "
            "leave biases out of experts, or use expert_tensor_parallel_size=1"
        )
    name = _expert_name(plain, place, place.expert[0], place.expert_tensor[0])
    return Parameter(tensor, name, plain, is_slice, is_copy, is_expert=True)


def _require_reduced(tensor: Any, plain: str, over_experts: bool) -> None:
    """Raise ValueError where gradients are reduced over other ranks than the name says."""
    if getattr(tensor, "allreduce", True) == over_experts:
        ranks = "the ranks of all experts" if over_experts else "expert-data-parallel ranks alone"
        raise ValueError(
            f"Megatron reduces the gradients of {plain} over {ranks}: dsx knows experts by "
            f"{_EXPERTS!r} in a parameter's name, and the other way round"
        )


def _expert_name(plain: str, place: Coordinates, expert: int, tensor: int) -> str:
    """Return the name of what these ranks hold of a layer's experts."""
    part = f".experts_{expert}" if place.expert[1] > 1 else ""
    return plain + part + (f".slice_{tensor}" if place.expert_tensor[1] > 1 else "")


def micro_batches(otherwise: int) -> int:
    """Return the micro-batches of a step by Megatron's calculator, if its loop has made one."""
    try:
        return int(num_microbatches_calculator.get_num_microbatches())
    except AttributeError:  # of None, in a script on megatron-core
        return otherwise


def stage_shapes(parameters: Sequence[Parameter], place: Coordinates) -> list[ParameterShape]:
    """Return what the ranks of this stage train together, tied copies left out."""
    shapes: list[ParameterShape] = []
    for parameter in parameters:
        shape, dtype = tuple(parameter.tensor.shape), dtype_name(parameter.tensor)
        if parameter.is_expert:
            everywhere = product(range(place.expert[1]), range(place.expert_tensor[1]))
            names = [_expert_name(parameter.plain, place, *ranks) for ranks in everywhere]
            shapes += [ParameterShape(name, shape, dtype) for name in names]
        elif parameter.is_slice and not parameter.is_tied_copy:
            ranks = range(place.tensor[1])
            names = [f"{parameter.plain}.slice_{r}" for r in ranks]
            shapes += [ParameterShape(name, shape, dtype) for name in names]
        elif not parameter.is_tied_copy:
            shapes.append(ParameterShape(parameter.name, shape, dtype))
    return shapes


def unwrapped(chunk: Any) -> Any:
    """Return the model inside Megatron's wrappers, each of which calls it `module`."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _layer_numbers(module: Any) -> Mapping[str, int]:
    """Return the global number of each layer, from 0, by its path in the chunk."""
    numbers: dict[str, int] = {}
    for path, layer in module.named_modules():
        match = _LAYER.match(f"{path}.")
        if match and path == match.group(0).rstrip("."):
            if not hasattr(layer, "layer_number"):
                raise ValueError(
                    f"{path} of {type(module).__name__} has no layer_number, by which dsx knows "
                    "a layer's place in the model"
                )
            numbers[match.group(0)] = int(layer.layer_number) - 1
    return numbers


def _is_known(name: str) -> bool:
    """Whether a parameter's name says its place in a model."""
    return bool(_LAYER.match(name)) or name.startswith((*_AT_FIRST, *_BEHIND_LAYERS, *_AT_LAST))


def _in_model(name: str, numbers: Mapping[str, int], module: Any) -> tuple[int, str]:
    """Return a parameter's place in the model, and its name there."""
    match = _LAYER.match(name)
    if match:
        layers, number = match.group(1), numbers[match.group(0)]
        behind = {"encoder": 0, "decoder": _BEHIND_ENCODER, "mtp": _BEHIND_DECODER}
        return behind[layers.split(".")[0]] + 1 + number, f"{layers}{number}.{name[match.end() :]}"
    if name.startswith(_AT_FIRST):
        return _FIRST, name
    if name.startswith(_BEHIND_LAYERS):
        return _BEHIND_ENCODER if name.startswith("encoder") else _BEHIND_DECODER, name
    if name.startswith(_AT_LAST):
        return _LAST, name
    raise ValueError(
        f"dsx does not know the place of parameter {name} of {type(module).__name__} in a "
        "pipeline: it serves models of embedding, encoder.layers and decoder.layers with their "
        "final norms, and what stands behind them: mtp.layers, output_layer, lm_head, pooler and "
        "binary_head. On one stage any model is served in its own order: use "
        "pipeline_model_parallel_size=1, or these names"
    )


def _predicts_more_tokens(module: Any, is_tied: bool, place: Coordinates) -> bool:
    """Whether a chunk behind the first stage embeds tokens once more (multi-token prediction).

    ValueError where its head is tied, too: then it holds two weights, of which it uses one.
    """
    is_first = place.pipeline[0] == 0
    if is_first or not getattr(module, "mtp_process", False):
        return False
    if is_tied:
        raise ValueError(
            f"dsx does not serve mtp_num_layers over {place.pipeline[1]} pipeline stages with a "
            "tied head; use --untie-embeddings-and-output-weights, or one stage"
        )
    return True


def _require_one_stage_of_two_parts(module: Any, place: Coordinates) -> None:
    """Raise ValueError for an encoder and a decoder over stages: each begins with an embedding."""
    parts = ("add_encoder", "add_decoder")
    if place.pipeline[1] > 1 and all(hasattr(module, part) for part in parts):
        raise ValueError(
            f"dsx does not serve {type(module).__name__} over {place.pipeline[1]} pipeline stages: "
            "encoder and decoder hold copies of one embedding; use pipeline_model_parallel_size=1"
        )
