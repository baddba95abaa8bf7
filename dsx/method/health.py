"""How outer training is doing, from a few sums that all clusters have in any case: four figures.

Of one fragment and round, with q_m what cluster m sent, Q their mean, Q' the mean of the round
before, over the same elements:

    autocorrelation  rho = Q.Q' / (|Q| |Q'|)
    cluster cosine   (|C Q|^2 - sum |q_m|^2) / ((sum |q_m|)^2 - sum |q_m|^2)
    norm ratio       of the cluster that is farthest from the median of the others, |q_m| over it;
                     of two clusters the smaller over the larger, as neither is the one apart
    effective gain   eta, eta / (1 - mu rho) or eta (1 + mu / (1 - mu rho))

The second follows from |C Q|^2 = sum |q_m|^2 + sum over pairs of 2 q_m.q_n: it is the mean cosine
of all pairs, weighed by their norms. The last is the part of an outer step along Q, over |Q|, for
sgd, momentum and nesterov: the buffer is sum_j mu^j Q_{k-j}, and its part along Q is |Q| times
sum_j mu^j rho_j. Derived here, with rho_j = rho^j (what a first-order autoregression has) and norms
that change little from round to round; at rho = 1 it is eta / (1 - mu), the usual gain of momentum
(Sutskever et al., ICML 2013, Sec. 2; Goh, Distill 2017), at rho = 0 what one round has by itself.

Where codes are coarse, Q is not the mean of the q_m that are known, and the second is left out. The
others are of Q as it was decoded.

Invariant: quotients and roots in float64, which IEEE 754 rounds alike everywhere, of sums that are
equal everywhere, so the figures are, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dsx.method.outer_optimizer import OuterOptimizer

_LARGEST = float.fromhex("0x1.fffffep127")  # fp32's; what is beyond is told as inf


@dataclass(frozen=True)
class Sums:
    """Of a fragment's round: |Q|^2, |Q'|^2, Q.Q' and each cluster's |q_m|^2; NaN if not known."""

    mean: float
    before: float
    product: float
    clusters: Sequence[float]


@dataclass(frozen=True)
class Figures:
    """The four figures of a fragment's round; None where there is nothing to tell it from.

    `farthest` is the position of the cluster whose norm `norm_ratio` is of; None of two.
    """

    autocorrelation: float | None
    cosine: float | None
    norm_ratio: float | None
    farthest: int | None
    gain: float | None


def figures_of(sums: Sums, outer: OuterOptimizer, codes_keep_norms: bool) -> Figures:
    """Return the figures; no cosine where codes are not of what is known of each cluster's norm."""
    rho = _over(sums.product, math.sqrt(_positive(sums.mean) * _positive(sums.before)))
    ratio, farthest = _farthest([math.sqrt(min(_positive(s), _LARGEST)) for s in sums.clusters])
    return Figures(
        autocorrelation=rho,
        cosine=_cosine(sums) if codes_keep_norms else None,
        norm_ratio=ratio,
        farthest=farthest,
        gain=effective_gain(outer, rho),
    )


def effective_gain(outer: OuterOptimizer, rho: float | None) -> float | None:
    """Return the part of an outer step along the mean; None for rules that are not linear."""
    rule = outer.stability_rule
    if rule is None or getattr(outer, "clip", None) is not None:
        return None
    rate: float = getattr(outer, "lr")  # noqa: B009 - these rules have one
    momentum: float = getattr(outer, "momentum", 0.0)
    if rule == "sgd" or not momentum:
        return rate
    if rho is None:
        return None
    along = 1 / (1 - momentum * min(1.0, max(-1.0, rho)))
    return rate * along if rule == "momentum" else rate * (1 + momentum * along)


def _cosine(sums: Sums) -> float | None:
    count, total = len(sums.clusters), sum(sums.clusters)
    norms = sum(math.sqrt(_positive(square)) for square in sums.clusters)
    return _over(count**2 * sums.mean - total, norms**2 - total) if count > 1 else None


def _farthest(norms: Sequence[float]) -> tuple[float | None, int | None]:
    """Return the norm that is farthest from the median of the others, over it, and whose it is.

    Of two as far, the larger one's. Of two clusters: the smaller over the larger, and of nobody.
    """
    if any(math.isnan(norm) for norm in norms):
        return None, None
    if len(norms) == 2:
        return _over(min(norms), max(norms)), None
    found: tuple[float | None, int | None] = None, None
    farthest = (0.0, 0.0)
    for position, norm in enumerate(norms):
        others = [other for n, other in enumerate(norms) if n != position]
        middle = median(others) if others else 0.0
        ratio = _over(norm, middle)
        far = (_over(max(norm, middle), min(norm, middle)) or math.inf, norm)
        if ratio is not None and far > farthest:
            farthest, found = far, (ratio, position)
    return found


def _over(part: float, whole: float) -> float | None:
    """Return a quotient; None where it is not known, or of nothing."""
    if math.isnan(part) or not whole > 0 or math.isinf(whole):
        return None
    return part / whole


def _positive(square: float) -> float:
    return max(square, 0.0) if not math.isnan(square) else math.nan
