"""What outer training keeps on a rank, from a recipe's numbers: as `dsx.memory`, without torch.

Of the rank with most of it, all ranks' shares being equal. Left out are what staleness keeps per
tensor and the pieces of matrices on their way inside a cluster; a test compares the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsx.plan.payload import GATHERED_UP_TO, Parts, format_of, largest_rank
from dsx.plan.recipes import Recipe
from dsx.plan.settings import Coding
from dsx.plan.traffic import Load

_MOST_SCRATCH = 4


@dataclass(frozen=True)
class OuterBytes:
    """Bytes of one rank by purpose; `residual` and `in_flight` are always on the host."""

    anchor: int
    momentum: int
    delay: int
    residual: int
    in_flight: int
    work_space: int
    contributions: int

    @property
    def total(self) -> int:
        """All of it but the contributions, which are made on the accelerator where state is."""
        return (
            self.anchor
            + self.momentum
            + self.delay
            + self.residual
            + self.in_flight
            + self.work_space
        )

    def on_device(self, is_on_host: bool) -> int:
        """Return what lies on the accelerator, state placed there or on the host."""
        if is_on_host:
            return 0
        return self.total - self.residual - self.in_flight + self.contributions

    def on_host(self, is_on_host: bool) -> int:
        """Return what lies in host memory."""
        return self.total if is_on_host else self.residual + self.in_flight


def outer_bytes(
    recipe: Recipe, coding: Coding, loads: Sequence[Load], num_clusters: int
) -> OuterBytes:
    """Return the bytes of the rank that holds most: of the largest stage, its first rank."""
    by_stage: dict[int, list[Parts]] = {}
    for load in loads:
        by_stage.setdefault(load.stage, []).append(load.parts[0][0])
    own = max(by_stage.values(), key=lambda parts: sum(p.numel for p in parts))
    numel, longest = sum(p.numel for p in own), max(p.numel for p in own)
    is_staggered = recipe.schedule == "streaming"
    return OuterBytes(
        anchor=4 * recipe.anchor * numel,
        momentum=4 * recipe.outer * numel,
        delay=4 * (recipe.delay + recipe.kept * recipe.buffers) * numel,
        residual=sum(_codec_bytes(p, coding, num_clusters) for p in own),
        in_flight=4 * recipe.buffers * numel,
        work_space=4 * _MOST_SCRATCH * longest,
        contributions=4 * (longest if is_staggered else numel),
    )


def _codec_bytes(parts: Parts, coding: Coding, num_clusters: int) -> int:
    """Return what residuals, of values and of means, and warm starts take."""
    kept = 0
    for run in parts.runs:
        mean = -(-run // num_clusters) if num_clusters > GATHERED_UP_TO else 0
        kept += _residual_bytes(run, coding) + _residual_bytes(mean, coding)
    kept += sum(_residual_bytes(run, coding) for run in parts.factored_runs)
    if coding.type != "low_rank":
        return kept
    ranks = [min(coding.max_rank, largest_rank(m, n, coding)) for m, n in parts.matrices]
    return kept + 8 + sum(4 * r * n for r, (_, n) in zip(ranks, parts.matrices, strict=True))


def _residual_bytes(numel: int, coding: Coding) -> int:
    if coding.type == "dense" or coding.error_feedback == "none":
        return 0
    return format_of(coding.error_feedback).num_bytes(numel)
