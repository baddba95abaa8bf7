"""The parameters of a GPT on one rank of a tensor- and pipeline-parallel cluster, from its sizes.

What a plan needs before there is a model: names and shapes are those of Megatron's `GPTModel`
(local spec), layers by their global number, and the tests compare them with the model itself. A
slice of a tensor-parallel weight is called `<name>.slice_<rank>`, as in a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsx.core.types import ParameterShape, Stage


@dataclass(frozen=True)
class Weight:
    """One parameter; `split` is the dimension that tensor parallelism cuts, None: held alike."""

    name: str
    shape: tuple[int, ...]
    split: int | None = None

    def on(self, tensor: tuple[int, int]) -> ParameterShape:
        """Return what lies on a tensor-parallel rank `(number, count)`."""
        rank, count = tensor
        if self.split is None or count == 1:
            return ParameterShape(self.name, self.shape)
        shape = tuple(
            size // count if dim == self.split else size for dim, size in enumerate(self.shape)
        )
        return ParameterShape(f"{self.name}.slice_{rank}", shape)


@dataclass(frozen=True)
class GPT:
    """Sizes of a decoder-only transformer; `vocabulary` is padded, `groups` are of keys/values."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocabulary: int
    positions: int | None = None  # learned ones; None: rotary
    is_gated: bool = False  # SwiGLU: two matrices into the MLP
    has_bias: bool = True
    has_qkv_bias: bool = False  # beside has_bias=False
    is_rms_norm: bool = False
    is_tied: bool = True

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.heads % self.groups:
            raise ValueError(
                f"hidden={self.hidden}, heads={self.heads}, query groups={self.groups}: each must "
                "be a multiple of the next"
            )

    def stage(self, stage: Stage, tensor: tuple[int, int] = (0, 1)) -> list[ParameterShape]:
        """Return what a rank trains, in the model's order; a tied copy on the last stage left out.

        ValueError where the model cannot be cut so.
        """
        return [weight.on(tensor) for weight in self.weights(stage, tensor[1])]

    def weights(self, stage: Stage, tensor_count: int = 1) -> list[Weight]:
        """Return a stage's parameters, whole; ValueError where they cannot be cut in `count`."""
        if self.layers % stage.count:
            raise ValueError(
                f"{self.layers} layers do not divide into {stage.count} pipeline stages"
            )
        own = self.layers // stage.count
        found = list(self._embedding()) if stage.index == 0 else []
        for number in range(stage.index * own, (stage.index + 1) * own):
            found += self._layer(f"decoder.layers.{number}.")
        if stage.index == stage.count - 1:
            found += self._norm("decoder.final_layernorm")
            if not self.is_tied:
                found.append(Weight("output_layer.weight", (self.vocabulary, self.hidden), 0))
        for weight in found:
            if weight.split is not None and weight.shape[weight.split] % tensor_count:
                raise ValueError(f"{weight.name} {weight.shape} does not divide by {tensor_count}")
        return found

    @property
    def numel(self) -> int:
        """All parameters, tied ones once."""
        return sum(p.numel for p in self.stage(Stage()))

    def _embedding(self) -> Iterator[Weight]:
        yield Weight("embedding.word_embeddings.weight", (self.vocabulary, self.hidden), 0)
        if self.positions is not None:
            shape = (self.positions, self.hidden)
            yield Weight("embedding.position_embeddings.weight", shape)

    def _layer(self, prefix: str) -> Iterator[Weight]:
        hidden = self.hidden
        queries_keys_values = hidden + 2 * self.groups * (hidden // self.heads)
        yield from self._norm(f"{prefix}input_layernorm")
        yield Weight(f"{prefix}self_attention.linear_proj.weight", (hidden, hidden), 1)
        if self.has_bias:
            yield Weight(f"{prefix}self_attention.linear_proj.bias", (hidden,))
        qkv = f"{prefix}self_attention.linear_qkv"
        yield Weight(f"{qkv}.weight", (queries_keys_values, hidden), 0)
        if self.has_bias or self.has_qkv_bias:
            yield Weight(f"{qkv}.bias", (queries_keys_values,), 0)
        yield from self._norm(f"{prefix}pre_mlp_layernorm")
        into = self.ffn * (2 if self.is_gated else 1)
        yield Weight(f"{prefix}mlp.linear_fc1.weight", (into, hidden), 0)
        if self.has_bias:
            yield Weight(f"{prefix}mlp.linear_fc1.bias", (into,), 0)
        yield Weight(f"{prefix}mlp.linear_fc2.weight", (hidden, self.ffn), 1)
        if self.has_bias:
            yield Weight(f"{prefix}mlp.linear_fc2.bias", (hidden,))

    def _norm(self, name: str) -> Iterator[Weight]:
        yield Weight(f"{name}.weight", (self.hidden,))
        if not self.is_rms_norm:
            yield Weight(f"{name}.bias", (self.hidden,))
