"""What the inner engine takes on a rank: weights, gradients, fp32 masters, Adam's moments.

Bytes per parameter that a rank holds, D being the ranks that share optimizer state:

    Megatron bf16   weights 2, gradients 4 (accumulated in fp32), masters 4/D, moments 8/D
    Megatron fp32   weights 4 (they are the masters), gradients 4, moments 8/D
    DeepSpeed bf16  ZeRO-1: weights 2, gradients 2, masters 4/D, moments 8/D; ZeRO-2 shards the
                    gradients, ZeRO-3 the weights, too; ZeRO-0 shards nothing; hpZ
                    over H ranks keeps the weights once more, 2/H. Where it sums bf16
                    gradients beside those of a micro-batch (of a pipeline under ZeRO-0, in
                    bf16; with grad_accum_dtype fp32, in fp32), these count, too

D is 1 for Megatron without the distributed optimizer. Not in it: buckets, workspaces, and the
parameters that ZeRO-3 gathers for a layer at a time.

Activations are an estimate, of layers whose inputs alone are kept (full recomputation): one input
of `sequence x micro-batch x hidden` in bf16 per layer and micro-batch under way, as many as there
are stages from this one on, and one layer's own, 34 bytes per element (Korthikanti et al. 2022,
eq. 2, without the attention scores that fused kernels do not keep). With context parallelism
`sequence` is a rank's part. A layer of experts has, in place of its MLP's 16 bytes, what goes to
the experts and comes back, and what they make of it, of tokens that are dealt to all ranks alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class InnerMemory:
    """Bytes of one rank by what they are for."""

    weights: int
    gradients: int
    masters: int
    moments: int
    activations: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(vars(self).values())

    def __add__(self, other: InnerMemory) -> InnerMemory:
        """Return both, purpose by purpose."""
        return InnerMemory(*(a + vars(other)[name] for name, a in vars(self).items()))


class Routed(NamedTuple):
    """Where tokens go in a layer of experts: to so many, with what is kept of each one's inside.

    `width` are an expert's elements per token, `shared` those of the one that all tokens go to.
    """

    top: int
    width: int
    shared: int


def megatron(
    numel: int, is_bf16: bool, sharing_ranks: int = 1, activations: int = 0
) -> InnerMemory:
    """Return what a rank with `numel` elements of weights takes.

    `sharing_ranks`: those of the data-parallel group with the distributed optimizer, else 1.
    """
    own = -(-numel // sharing_ranks)
    weights, masters = (2 * numel, 4 * own) if is_bf16 else (4 * numel, 0)
    return InnerMemory(weights, 4 * numel, masters, 8 * own, activations)


def deepspeed(
    numel: int,
    is_bf16: bool,
    zero_stage: int,
    sharing_ranks: int,
    activations: int = 0,
    hpz: int = 1,
    accumulated: int = 0,
) -> InnerMemory:
    """Return what a rank takes of a model with `numel` elements, or of its pipeline stage.

    `hpz`: the ranks that keep a second copy of ZeRO-3's weights among them, 1 for none.
    `accumulated`: bytes of an element in which gradients are summed beside a micro-batch's.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage={zero_stage} must be 0, 1, 2 or 3")
    own = -(-numel // sharing_ranks)
    held = own if zero_stage >= 3 else numel
    held += -(-numel // hpz) if zero_stage >= 3 and hpz > 1 else 0
    reduced = own if zero_stage >= 2 else numel
    stepped = own if zero_stage >= 1 else numel
    if is_bf16:
        gradients = (2 + accumulated) * reduced
        return InnerMemory(2 * held, gradients, 4 * stepped, 8 * stepped, activations)
    masters = 4 * stepped if zero_stage in (1, 2) else 0  # else the weights are the masters
    return InnerMemory(4 * held, 4 * reduced, masters, 8 * stepped, activations)


def recomputed_activations(
    sequence: int,
    micro_batch: int,
    hidden: int,
    layers_here: int,
    under_way: int,
    tensor_count: int = 1,
    is_sequence_parallel: bool = False,
    routed: Routed | None = None,
) -> int:
    """Return the bytes of a stage's activations with full recomputation, as estimated above.

    Without sequence parallelism every tensor-parallel rank keeps whole inputs, and a third of a
    layer's own is not cut either (10 of 34 bytes, equation 2).
    """
    elements = sequence * micro_batch * hidden
    inputs = 2 * elements * layers_here * under_way
    cut = 24 * elements  # of a layer's own
    if routed is not None:
        to_experts = routed.top * (2 * hidden + routed.width) + routed.shared
        cut += 2 * sequence * micro_batch * to_experts - 16 * elements
    if is_sequence_parallel:
        return (inputs + 10 * elements + cut) // tensor_count
    return inputs + 10 * elements + cut // tensor_count
