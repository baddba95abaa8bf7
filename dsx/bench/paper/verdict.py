"""Whether a paper's order holds here: from the samples alone.

Two rows are told apart where the mean of their differences, taken seed by seed, is beyond twice the
standard deviation of these differences and beyond a thousandth of the larger mean; a single sample
has no spread. A row that has diverged is behind all that have not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, stdev

from dsx.bench.paper.table import Claim, Samples

_SPREADS = 2.0
_SHARE_THAT_SHOWS = 1e-3
HOLDS, DIFFERS, NOISE = "holds", "differs", "within noise"


@dataclass(frozen=True)
class Verdict:
    """On one claim: `status` is "holds", "differs" or "within noise", `sentence` says it whole."""

    claim: Claim
    status: str
    sentence: str


def judge(claim: Claim, samples: Samples, heading: str) -> Verdict:
    """Return whether a claim holds in the samples; `heading` names its figure."""
    values = {label: samples[label][claim.figure] for group in claim.groups for label in group}
    count = len(values[claim.groups[0][0]])
    known = f"({count} samples each)" if count > 1 else "(one sample each: no spread is known)"
    figure = " ".join(heading.split())
    return (_judge_equality if claim.is_equal else _judge_order)(claim, values, figure, known)


def _judge_order(
    claim: Claim, values: Mapping[str, Sequence[float]], figure: str, known: str
) -> Verdict:
    groups = claim.groups
    pairs = [
        (better, worse)
        for place, group in enumerate(groups)
        for better in group
        for later in groups[place + 1 :]
        for worse in later
    ]
    signs = {
        (better, worse): compare(values[better], values[worse], claim.lower_is_better)
        for better, worse in pairs
    }
    reversed_pairs = [pair for pair, sign in signs.items() if sign < 0]
    unclear = [pair for pair, sign in signs.items() if sign == 0]
    holding = f"of {len(pairs)} pairs {len(pairs) - len(reversed_pairs) - len(unclear)} hold"
    order = f"The paper's order by {figure}, {claim},"
    if reversed_pairs:
        named = ", ".join(f"{worse} is before {better}" for better, worse in reversed_pairs)
        sentence = f"{order} does not hold here: {named}; {holding} {known}."
        return Verdict(claim, DIFFERS, sentence)
    if unclear:
        named = ", ".join(f"{better} and {worse}" for better, worse in unclear)
        sentence = f"{order} is within noise here for {named}; {holding} {known}."
        return Verdict(claim, NOISE, sentence)
    return Verdict(claim, HOLDS, f"{order} holds here {known}.")


def _judge_equality(
    claim: Claim, values: Mapping[str, Sequence[float]], figure: str, known: str
) -> Verdict:
    pairs = [
        pair
        for pair in combinations(claim.groups[0], 2)
        if not _are_equal(values[pair[0]], values[pair[1]], claim.tolerance)
    ]
    equality = f"That {claim} by {figure}"
    within = f"to {100 * claim.tolerance:g} %"
    if not pairs:
        return Verdict(claim, HOLDS, f"{equality} holds here {within} {known}.")
    apart = [(a, b) for a, b in pairs if compare(values[a], values[b], lower_is_better=True)]
    named = ", ".join(f"{a} and {b}" for a, b in apart or pairs)
    if apart:
        sentence = f"{equality} does not hold here {within}: {named} differ {known}."
        return Verdict(claim, DIFFERS, sentence)
    return Verdict(claim, NOISE, f"{equality} {within} is within noise here for {named} {known}.")


def _are_equal(a: Sequence[float], b: Sequence[float], tolerance: float) -> bool:
    """Return whether each sample of `a` is that of `b`; what has diverged is equal to nothing."""
    return all(
        math.isclose(x, y, rel_tol=tolerance) and math.isfinite(x)
        for x, y in zip(a, b, strict=True)
    )


def compare(better: Sequence[float], worse: Sequence[float], lower_is_better: bool) -> int:
    """Return 1 if `better` is better, -1 if `worse` is, 0 if they cannot be told apart."""
    diverged = [not all(map(math.isfinite, values)) for values in (better, worse)]
    if any(diverged):
        return diverged[1] - diverged[0]
    sign = 1 if lower_is_better else -1
    differences = [sign * (w - b) for b, w in zip(better, worse, strict=True)]
    mean = fmean(differences)
    noise = _SPREADS * stdev(differences) if len(differences) > 1 else 0.0
    unseen = _SHARE_THAT_SHOWS * max(abs(fmean(better)), abs(fmean(worse)))
    return 0 if abs(mean) <= max(noise, unseen) else int(math.copysign(1, mean))
