"""Where a weight lies in Megatron's distributed checkpoints (megatron.core.dist_checkpointing).

There a weight has one key and its whole shape, whatever the layout: layers that are all alike lie
in one tensor [layers, ...], experts in [..., experts, out, in] whichever class holds them, and a
norm has the name that it has inside Transformer Engine's linear layers. Layers that are not alike
(--moe-layer-freq) have keys of their own. What a model of Transformer Engine or of plain linear
layers asks for beside, an empty `_extra_state` of each module, is there as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dsx.checkpoint.weight_files import HasShape
from dsx.engines.megatron_model.experts import ExpertName
from dsx.engines.megatron_model.mixture import dense_layers
from dsx.engines.megatron_model.notes import ModelNotes

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_PLAIN = {  # what gives layers other keys
    "multi_latent_attention": False, "linear_attention_freq": None, "mtp_num_layers": None,
    "heterogeneous_block_specs": False, "hetereogenous_dist_checkpoint": False,
    "experimental_attention_variant": None,
}  # fmt: skip
_WITHOUT_STATE = ("embedding.", "output_layer.", "decoder.final_layernorm.bias")
_NO_MODULE = re.compile(r"\.(gate_weight|router\.\w+)$")


@dataclass(frozen=True)
class Piece:
    """A part of a key's tensor: one weight, or one of them for a layer and an expert.

    `lead` is its place in the first dimensions of the tensor, `counts` their sizes, `shape` what
    follows them; `form` makes that of the weight.
    """

    key: str
    lead: tuple[int, ...]
    counts: tuple[int, ...]
    shape: tuple[int, ...]
    source: str
    form: Callable[[Tensor], Tensor] = lambda whole: whole

    @property
    def offset(self) -> tuple[int, ...]:
        """Where it begins in the tensor."""
        return (*self.lead, *(0 for _ in self.shape))


def require_keys_are_known(notes: ModelNotes) -> None:
    """Raise ValueError for a model whose keys dsx does not know."""
    otherwise = "dsx export --out DIR writes the weights under Megatron's names"
    if notes.kind != "GPTModel":
        raise ValueError(
            f"the model is a {notes.kind}, and dsx writes Megatron's checkpoints of a GPTModel; "
            f"{otherwise}"
        )
    for name, value in _PLAIN.items():
        found = notes.transformer.get(name, value)
        if found != value:
            raise ValueError(
                f"{name}={found!r}: dsx writes Megatron's checkpoints of models that have "
                f"{name}={value!r}; {otherwise}"
            )


def pieces_of(parameters: Mapping[str, HasShape], notes: ModelNotes) -> Iterator[Piece]:
    """Yield what every weight of a model writes, in the order of `parameters`."""
    keys = _Keys(notes)
    for name, parameter in parameters.items():
        yield from keys.of(name, tuple(parameter.shape))


def empty_states(parameters: Mapping[str, HasShape], notes: ModelNotes) -> list[str]:
    """Return the keys of the modules' further states, all of which are empty."""
    keys, found = _Keys(notes), dict[str, None]()
    for name in parameters:
        for module, lead, counts in keys.modules(name):
            offset = ".".join(map(str, lead or (0,)))
            size = ".".join(map(str, counts or (1,)))
            found[f"{module}._extra_state/shard_{offset}_{size}"] = None
    return list(found)


class _Keys:
    """Keys of a model's weights."""

    def __init__(self, notes: ModelNotes) -> None:
        given: Any = notes.transformer
        self._layers: int = given["num_layers"]
        self._dense = dense_layers(notes)
        frequency = given.get("moe_layer_freq", 1)
        self._alike = frequency == 1 or given.get("num_moe_experts") is None
        self._experts: int = given.get("num_moe_experts") or 0

    def of(self, name: str, shape: tuple[int, ...]) -> Iterator[Piece]:
        """Yield what one weight of this shape writes."""
        match = _LAYER.match(name)
        if match is None:
            yield Piece(name, (), (), shape, name)
            return
        layer, inside = int(match[1]), match[2]
        prefix, lead, counts = self._place(layer)
        if expert := ExpertName.of(name):
            key = f"{prefix}mlp.experts.experts.{expert.linear}.{expert.what}"
            if expert.number is not None:
                lead, counts = (*lead, expert.number), (*counts, self._experts)
                yield Piece(key, lead, counts, shape, name)
                return
            stack = expert.as_stack(self._experts, shape)
            whole = (stack[0], stack[2], stack[1])  # as linear layers have them

            def transposed(stacked: Tensor) -> Tensor:
                return stacked.view(stack).transpose(1, 2)

            yield Piece(key, lead, counts, whole, name, transposed)
            return
        for key in self._names(layer, inside):
            yield Piece(prefix + key, lead, counts, shape, name)

    def modules(self, name: str) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Yield the modules that have a further state, with their place and the counts."""
        match = _LAYER.match(name)
        if name.startswith(_WITHOUT_STATE) or _NO_MODULE.search(name):
            return
        if match is None:
            yield name.rpartition(".")[0], (), ()
            return
        prefix, lead, counts = self._place(int(match[1]))
        if expert := ExpertName.of(name):
            module = f"{prefix}mlp.experts.experts.{expert.linear}"
            numbers = range(self._experts) if expert.number is None else [expert.number]
            for number in numbers:
                yield module, (*lead, number), (*counts, self._experts)
            return
        for key in self._names(int(match[1]), match[2]):
            yield prefix + key.rpartition(".")[0], lead, counts
        if match[2].startswith("self_attention.linear_qkv."):
            yield f"{prefix}self_attention.core_attention", lead, counts

    def _place(self, layer: int) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        if self._alike:
            return "decoder.layers.", (layer,), (self._layers,)
        return f"decoder.layers.{layer}.", (), ()

    def _names(self, layer: int, inside: str) -> Iterator[str]:
        """Yield the names of a layer's weight: those of norms as inside of what follows them.

        Before experts Transformer Engine's layers have the norm apart, and others do not.
        """
        for apart, within in _NORMS.items():
            if inside.startswith(apart):
                yield inside.replace(apart, within, 1)
                if layer not in self._dense and apart == "pre_mlp_layernorm.":
                    yield inside
                return
        yield inside
