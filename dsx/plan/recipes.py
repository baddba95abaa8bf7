"""The presets in plain numbers, and the codecs that a plan chooses from: what a search varies.

A test compares every row with the preset itself: what it is for the line, and what it keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from dsx.method.fragments import ByLayer, Fragmenter, WholeModel
from dsx.plan.settings import Coding, Notes, ScheduleName, Settings

Overlap = Literal["none", "steps", "round"]
MOST_LAYERWISE = 64  # fragments of dreamddp: each has a thread and connections of its own
_HEADS = ("embed", "wte", "wpe", "lm_head", "output_layer")


@dataclass(frozen=True)
class Recipe:
    """A preset: when it sends, how late it applies, and what it keeps per element of masters.

    `anchor`, `outer` and `delay` count fp32 vectors beside the transfers' own, `kept` those of
    each transfer under way. `staleness` is what being late costs, in doublings of H, beside tau / H
    (see ranking.py).
    """

    schedule: ScheduleName = "periodic"
    rounds_late: int = 0
    fragment_counts: tuple[int, ...] = ()  # none: the whole model
    pattern: Literal["strided", "sequential"] = "strided"
    anchor: int = 1
    outer: int = 1
    delay: int = 0
    kept: int = 0
    staleness: float = 0.0
    notes: Notes = field(default_factory=Notes)
    is_averaging: bool = False  # sends parameters, which no codec may touch
    is_low_rank: bool = False

    @property
    def is_overlapped(self) -> bool:
        """Whether transfers hide behind tau steps."""
        return self.schedule in ("streaming", "adaptive")

    @property
    def buffers(self) -> int:
        """Transfers of a fragment under way at a time."""
        return self.rounds_late + 1

    def fragmenter(self, count: int) -> Fragmenter:
        """Return how the model is cut into so many fragments."""
        if not self.fragment_counts:
            return WholeModel()
        return ByLayer(count, self.pattern)

    def settings(self, interval: int, overlap_steps: int, coding: Coding) -> Settings:
        """Return what the line sees."""
        notes = self.notes
        if self.is_low_rank:
            notes = Notes(by_cluster=3, of_owner=coding.max_rank + 1)
        return Settings(
            self.schedule, interval, overlap_steps, self.rounds_late, coding=coding, notes=notes
        )


RECIPES: dict[str, Recipe] = {
    "diloco": Recipe(),
    "slowmo": Recipe(staleness=0.1),
    "local_sgd": Recipe(outer=0, staleness=0.3),
    "streaming_diloco": Recipe("streaming", fragment_counts=(4, 8), staleness=0.1),
    "cocodc": Recipe(
        "adaptive",
        fragment_counts=(4,),
        kept=1,
        staleness=0.1,
        notes=Notes(by_cluster=3, of_owner=1),
    ),
    "eager": Recipe(rounds_late=1, delay=2, kept=1, staleness=0.8),
    "diloco_delayed": Recipe(rounds_late=1, staleness=1.0),
    "co2": Recipe(rounds_late=1, staleness=1.0, notes=Notes(per_tensor=1)),
    "dilocox": Recipe(
        rounds_late=1,
        fragment_counts=(4,),
        pattern="sequential",
        staleness=1.0,
        is_low_rank=True,
    ),
    "dreamddp": Recipe(
        "layerwise",
        fragment_counts=(MOST_LAYERWISE,),
        pattern="sequential",
        anchor=0,
        outer=0,
        kept=1,
        staleness=0.3,
        notes=Notes(by_cluster=3),
        is_averaging=True,
    ),
}


@dataclass(frozen=True)
class Codec:
    """A choice of `compression`: as the block has it, as the line sees it, and what it loses.

    `loss` is in doublings of H, like a recipe's staleness.
    """

    name: str
    block: dict[str, Any]
    coding: Coding
    loss: float


def _quantized(wire: str, loss: float, **fields: Any) -> Codec:
    block = {"type": "quantized", "wire": wire, **fields}
    return Codec(wire, block, Coding("quantized", wire=wire, **fields), loss)


CODECS = (
    Codec("fp32", {}, Coding(), 0.0),
    _quantized("bf16", 0.02),
    _quantized("int8", 0.1),
    _quantized("int4", 0.3, error_feedback="fp32"),
)


def low_rank(rank: int, hidden: int) -> Codec:
    """Return dilocox's factors in int4; every halving of the rank is worth a quarter doubling."""
    coding = Coding(
        "low_rank",
        error_feedback="fp32",
        rank=rank,
        max_rank=rank,
        factor_wire="int4",
        dense_rounds=5,
        exclude=_HEADS,
    )
    halvings = (hidden // rank).bit_length() - 1
    return Codec("low rank", {}, coding, 0.5 + 0.25 * halvings)


def codecs_for(recipe: Recipe, hidden: int | None) -> list[Codec]:
    """Return what a preset may send in: factors need the sizes of matrices."""
    if recipe.is_averaging:
        return [CODECS[0]]
    if not recipe.is_low_rank:
        return list(CODECS)
    if hidden is None:
        return []
    ranks = [hidden >> halvings for halvings in range(2, 8)]
    return [low_rank(rank, hidden) for rank in ranks if rank >= 16]
