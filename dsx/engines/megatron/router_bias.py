"""The bias of a mixture's router, by which Megatron balances its experts without a loss.

`--moe-router-enable-expert-bias` (arXiv:2408.15664): a buffer `expert_bias` [experts] in fp32 is
added to the scores that choose a token's experts. Behind each backward Megatron moves it by a fixed
rate, with the sign of what each expert lacks of the mean load of the cluster's whole batch. That is
an inner step by another rule than the optimizer's, so outer training treats the bias as it treats
weights: it is a vector of its layer, in that layer's fragment, with an anchor, a pseudo-gradient
and a delay, and every cluster takes the same bits of the outer step.

All ranks of a stage hold it alike. The distributed optimizer does not know of it: dsx divides it
over data- and context-parallel ranks by itself there, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dsx.engines.masters import Piece
from dsx.engines.megatron.masters import MasterPlace

BIAS = "expert_bias"


class RouterBiases(MasterPlace):
    """The biases of this rank's routers, which are their own masters; `leaf` is the model."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        super().__init__(chunks)
        self._biases = [bias for chunk in chunks for _, bias in biases_of(chunk)]
        for bias in self._biases:
            if bias.dtype != torch.float32:  # as Megatron does, but not before its first forward
                bias.data = bias.data.float()

    def parameters(self) -> list[Any]:
        """Return the biases."""
        return self._biases

    def pieces(self) -> list[tuple[Any, Piece]]:
        """Return the biases themselves."""
        return [(bias, Piece(bias, tuple(bias.shape))) for bias in self._biases]

    def copy(self) -> None:
        """Nothing to copy."""


def biases_of(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the routers' biases of a model by name."""
    for name, buffer in module.named_buffers():
        if name.split(".")[-1] == BIAS:
            yield name, buffer


def places_of_biases(chunks: Sequence[Any]) -> list[MasterPlace]:
    """Return where a rank's biases are: one place, or none where its routers have none."""
    place = RouterBiases(chunks)
    return [place] if place.parameters() else []
