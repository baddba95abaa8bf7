"""H that grows as the inner rate falls, at the bytes of a constant one: the quadratic rule.

QSR (Gu et al., arXiv:2310.14423): H = (alpha / rate)^2, and a least one while the rate is high.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dsx.bench.convergence.task import Study, inner_rate, warmup_steps

_LEAST, _MOST = 0.5, 4.0  # of the study's H


def growing_intervals(study: Study) -> Sequence[int]:
    """Return H at each step, with about as many rounds as the study's H gives.

    Between a half and four times the study's; alpha is what gives that number of rounds.
    """
    rates = [inner_rate(study, step) for step in range(1, study.num_steps + 1)]
    low, high = 0.0, 100.0 * math.sqrt(study.interval) * study.inner_lr
    for _ in range(60):
        alpha = (low + high) / 2
        rounds = sum(1 / h for h in _intervals(study, rates, alpha))
        low, high = (alpha, high) if rounds > study.num_steps / study.interval else (low, alpha)
    return _intervals(study, rates, low)


def _intervals(study: Study, rates: Sequence[float], alpha: float) -> list[int]:
    least, most = math.ceil(_LEAST * study.interval), round(_MOST * study.interval)
    warmup = warmup_steps(study)  # whose low rates are no late ones
    return [
        least if step < warmup else min(most, max(least, int((alpha / max(rate, 1e-12)) ** 2)))
        for step, rate in enumerate(rates, start=1)
    ]
