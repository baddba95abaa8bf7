"""Whether a paper's order holds here: from the samples alone.

Two rows are told apart where the mean of their differences, taken seed by seed, is beyond twice the
standard deviation of these differences; a single sample has no spread, so any difference counts. A
row that has diverged is behind all that have not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from dsx.bench.paper.table import Claim, Samples

_SPREADS = 2.0
HOLDS, DIFFERS, NOISE = "holds", "differs", "within noise"


@dataclass(frozen=True)
class Verdict:
    """On one claim: `status` is "holds", "differs" or "within noise", `sentence` says it whole."""

    claim: Claim
    status: str
    sentence: str


def judge(claim: Claim, samples: Samples, heading: str) -> Verdict:
    """Return whether the order of a claim holds in the samples; `heading` names its figure."""
    groups = claim.groups
    pairs = [
        (better, worse)
        for place, group in enumerate(groups)
        for better in group
        for later in groups[place + 1 :]
        for worse in later
    ]
    signs = {
        (better, worse): compare(
            samples[better][claim.figure], samples[worse][claim.figure], claim.lower_is_better
        )
        for better, worse in pairs
    }
    reversed_pairs = [pair for pair, sign in signs.items() if sign < 0]
    unclear = [pair for pair, sign in signs.items() if sign == 0]
    holding = f"of {len(pairs)} pairs {len(pairs) - len(reversed_pairs) - len(unclear)} hold"
    order = f"The paper's order by {' '.join(heading.split())}, {claim},"
    count = len(samples[pairs[0][0]][claim.figure])
    known = f"({count} samples each)" if count > 1 else "(one sample each: no spread is known)"
    if reversed_pairs:
        named = ", ".join(f"{worse} is before {better}" for better, worse in reversed_pairs)
        sentence = f"{order} does not hold here: {named}; {holding} {known}."
        return Verdict(claim, DIFFERS, sentence)
    if unclear:
        named = ", ".join(f"{better} and {worse}" for better, worse in unclear)
        sentence = f"{order} is within noise here for {named}; {holding} {known}."
        return Verdict(claim, NOISE, sentence)
    return Verdict(claim, HOLDS, f"{order} holds here {known}.")


def compare(better: Sequence[float], worse: Sequence[float], lower_is_better: bool) -> int:
    """Return 1 if `better` is better, -1 if `worse` is, 0 if that is within noise."""
    diverged = [not all(map(math.isfinite, values)) for values in (better, worse)]
    if any(diverged):
        return diverged[1] - diverged[0]
    sign = 1 if lower_is_better else -1
    differences = [sign * (w - b) for b, w in zip(better, worse, strict=True)]
    mean = fmean(differences)
    noise = _SPREADS * stdev(differences) if len(differences) > 1 else 0.0
    return 0 if abs(mean) <= noise else int(math.copysign(1, mean))
