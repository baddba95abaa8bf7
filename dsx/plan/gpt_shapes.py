"""The parameters of a GPT on one rank of a cluster that is cut in several ways, from its sizes.

What a plan needs before there is a model: names and shapes are those of Megatron's `GPTModel`
(local spec), layers by their global number, and the tests compare them with the model itself. A
slice of a tensor-parallel weight is called `<name>.slice_<rank>`, and what a rank holds of experts
`<name>.experts_<expert-parallel rank>`, as in a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dsx.core.types import ParameterShape, Stage
from dsx.plan.pipeline_split import PipelineSplit


class Division(NamedTuple):
    """Over how many ranks weights are cut: dense ones, a layer's experts, and each expert."""

    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1


WHOLE = Division()
_LEAST_IN_BILLIONS = 10**8


@dataclass(frozen=True)
class Weight:
    """One parameter; `split` is the dimension that tensor parallelism cuts, None: held alike."""

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    is_expert: bool = False

    def on(self, tensor: tuple[int, int], expert: tuple[int, int] = (0, 1)) -> ParameterShape:
        """Return what lies on a tensor- and expert-parallel rank, each `(number, count)`.

        An expert's `tensor` is its own, expert tensor parallelism's.
        """
        part = f".experts_{expert[0]}" if self.is_expert and expert[1] > 1 else ""
        rank, count = tensor
        if self.split is None or count == 1:
            return ParameterShape(self.name + part, self.shape)
        shape = tuple(
            size // count if dim == self.split else size for dim, size in enumerate(self.shape)
        )
        return ParameterShape(f"{self.name}{part}.slice_{rank}", shape)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP, in the layers that `layers` says are one.

    `top` of `count` take each token, beside a shared one of width `shared`, if there is one.
    """

    count: int
    ffn: int
    top: int
    layers: tuple[bool, ...]
    shared: int | None = None
    has_shared_gate: bool = False


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
    channels: int | None = None  # of a head; None: hidden / heads
    has_qk_norm: bool = False
    experts: Experts | None = None

    def __post_init__(self) -> None:
        if (self.channels is None and self.hidden % self.heads) or self.heads % self.groups:
            raise ValueError(
                f"hidden={self.hidden}, heads={self.heads}, query groups={self.groups}: each must "
                "be a multiple of the next"
            )
        if self.experts is not None and len(self.experts.layers) != self.layers:
            raise ValueError(
                f"experts are told of {len(self.experts.layers)} layers, where there are "
                f"{self.layers}: --moe-layer-freq names every layer"
            )

    def stage(self, stage: Stage) -> list[ParameterShape]:
        """Return a stage's parameters whole, in the model's order; a copy tied at the end left out.

        Of equal stages; ValueError where the model cannot be cut so.
        """
        return [weight.on((0, 1)) for weight in self.weights(stage)]

    def weights(
        self, stage: Stage, cut: Division = WHOLE, layers: Sequence[int] | None = None
    ) -> list[Weight]:
        """Return a stage's parameters, tensors whole, and experts as many as a rank has of them.

        `layers` are the stage's, None: of equal ones. ValueError where they cannot be cut so.
        """
        found = list(self._embedding()) if stage.index == 0 else []
        if layers is None:
            (layers,) = PipelineSplit().layers(self.layers, stage.count)[stage.index]
        for number in layers:
            found += self._layer(number, cut)
        if stage.index == stage.count - 1:
            found += self._norm("decoder.final_layernorm")
            if not self.is_tied:
                found.append(Weight("output_layer.weight", (self.vocabulary, self.hidden), 0))
        for weight in found:
            count = cut.expert_tensor if weight.is_expert else cut.tensor
            if weight.split is not None and weight.shape[weight.split] % count:
                raise ValueError(f"{weight.name} {weight.shape} does not divide by {count}")
        return found

    @cached_property
    def numel(self) -> int:
        """All parameters, tied ones once."""
        return sum(p.numel for p in self.stage(Stage()))

    @cached_property
    def active_numel(self) -> int:
        """The parameters that a token goes through: of experts only those that take it."""
        experts = self.experts
        if experts is None:
            return self.numel
        one = (3 if self.is_gated else 2) * experts.ffn * self.hidden
        return self.numel - sum(experts.layers) * (experts.count - experts.top) * one

    @property
    def in_words(self) -> str:
        """How many parameters it has, in words, and of experts how many a token goes through."""
        if self.experts is None and self.numel < _LEAST_IN_BILLIONS:
            return f"{self.numel / 1e6:.1f} M parameters"
        if self.experts is None:
            return f"{self.numel / 1e9:.1f} B parameters"
        return f"{self.numel / 1e9:.1f} B parameters, {self.active_numel / 1e9:.1f} B active"

    def _embedding(self) -> Iterator[Weight]:
        yield Weight("embedding.word_embeddings.weight", (self.vocabulary, self.hidden), 0)
        if self.positions is not None:
            shape = (self.positions, self.hidden)
            yield Weight("embedding.position_embeddings.weight", shape)

    def _layer(self, number: int, cut: Division) -> Iterator[Weight]:
        prefix, hidden = f"decoder.layers.{number}.", self.hidden
        channels = self.channels or hidden // self.heads
        attended = self.heads * channels
        queries_keys_values = attended + 2 * self.groups * channels
        yield from self._norm(f"{prefix}input_layernorm")
        yield Weight(f"{prefix}self_attention.linear_proj.weight", (hidden, attended), 1)
        if self.has_bias:
            yield Weight(f"{prefix}self_attention.linear_proj.bias", (hidden,))
        qkv = f"{prefix}self_attention.linear_qkv"
        yield Weight(f"{qkv}.weight", (queries_keys_values, hidden), 0)
        if self.has_bias or self.has_qkv_bias:
            yield Weight(f"{qkv}.bias", (queries_keys_values,), 0)
        if self.has_qk_norm:
            yield from self._norm(f"{prefix}self_attention.q_layernorm", channels)
            yield from self._norm(f"{prefix}self_attention.k_layernorm", channels)
        yield from self._norm(f"{prefix}pre_mlp_layernorm")
        if self.experts is not None and self.experts.layers[number]:
            yield from self._mixture(self.experts, f"{prefix}mlp.", cut)
        else:
            yield from self._mlp(f"{prefix}mlp.", self.ffn)

    def _mixture(self, experts: Experts, prefix: str, cut: Division) -> Iterator[Weight]:
        if experts.count % cut.expert:
            raise ValueError(
                f"{experts.count} experts do not divide over {cut.expert} expert-parallel ranks"
            )
        yield Weight(f"{prefix}router.weight", (experts.count, self.hidden))
        for number in range(experts.count // cut.expert):
            own = f"{prefix}experts.local_experts.{number}."
            yield from self._mlp(own, experts.ffn, is_expert=True)
        if experts.shared is None:
            return
        shared = f"{prefix}shared_experts."
        if experts.has_shared_gate:  # which a module has before its submodules
            yield Weight(f"{shared}gate_weight", (1, self.hidden))
        yield from self._mlp(shared, experts.shared)

    def _mlp(self, prefix: str, ffn: int, is_expert: bool = False) -> Iterator[Weight]:
        into = ffn * (2 if self.is_gated else 1)
        yield Weight(f"{prefix}linear_fc1.weight", (into, self.hidden), 0, is_expert)
        if self.has_bias:
            yield Weight(f"{prefix}linear_fc1.bias", (into,), 0, is_expert)
        yield Weight(f"{prefix}linear_fc2.weight", (self.hidden, ffn), 1, is_expert)
        if self.has_bias:
            yield Weight(f"{prefix}linear_fc2.bias", (self.hidden,), None, is_expert)

    def _norm(self, name: str, size: int | None = None) -> Iterator[Weight]:
        yield Weight(f"{name}.weight", (size or self.hidden,))
        if not self.is_rms_norm:
            yield Weight(f"{name}.bias", (size or self.hidden,))
