"""How large an outer rate a delay allows: the edge of stability, from the roots of the recursion.

Source: derived here for the outer rules of DiLoCo (arXiv:2311.08105) and SlowMo / CO2
(arXiv:1910.00643, arXiv:2401.16265) under the delays of Eager Updates (arXiv:2502.12996, Alg. 2
and 3). The model is a one-dimensional quadratic on which all clusters are equal: a round covers
the share kappa of the distance to the optimum, so `D_k = kappa * Theta_k`. With n rounds of delay
and the fresh share s the outer rule sees `E_k = s*D_k + (1-s)*D_{k-n}`, and Theta_k = z^k solves
the recursion for the roots z of (x = eta*kappa, mu the outer momentum)

    (z-1) (z-mu) z^n + x N(z) (s z^n + 1-s),    N = z (momentum), (1+mu) z - mu (nesterov)

and sgd is momentum with mu = 0. kappa is near 1 in sharp directions, so the limit on x is one on
eta. Naive delay is n = 1, s = 0; eager overlap over n rounds with C clusters is s = 1/C.

Invariant: every x in (0, limit) is stable, up to unstable windows narrower than `_SCAN_RATIO`.
Deviation: clusters whose anchors differ (the paper's eager form) add modes that do not bind for
the outer rules above with C >= 2; the tests run that form with its separate anchors.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

LinearRule = Literal["nesterov", "momentum", "sgd"]
_Coefficients = NDArray[np.float64]  # highest power first

_SCAN_RATIO = 1.01
_SCAN_BLOCK = 64
_MIN_ROUNDS_PER_MEMORY = 10.0


def largest_stable_rate(
    rule: LinearRule, momentum: float, delay_rounds: int = 0, fresh_share: float = 0.0
) -> float:
    """Return the largest stable eta*kappa: below it, every root lies within the unit circle.

    `delay_rounds` is 0 for blocking rules, 1 for `delayed`, n for `eager`; `fresh_share` is 0 for
    `delayed` and 1/C for `eager`. Raises ValueError for a value outside its range.
    """
    if rule not in get_args(LinearRule):
        raise ValueError(
            f"rule={rule!r} must be one of {', '.join(get_args(LinearRule))}; other outer rules "
            "are not linear and have no such limit"
        )
    _require_momentum(momentum)
    if rule == "sgd" and momentum != 0:
        raise ValueError(f"momentum={momentum} must be 0 for rule='sgd'; use rule='momentum'")
    if delay_rounds < 0:
        raise ValueError(
            f"delay_rounds={delay_rounds} must be 0 or more; use 0 for a blocking rule"
        )
    if not 0 <= fresh_share <= 1:
        raise ValueError(
            f"fresh_share={fresh_share} must be from 0 to 1; use 1 / num_clusters for eager overlap"
        )
    return _limit(rule == "nesterov", float(momentum), int(delay_rounds), float(fresh_share))


def too_few_rounds(num_rounds: float, momentum: float) -> bool:
    """Return whether a run is too short for its outer momentum: `rounds * (1 - mu) < 10`."""
    if not num_rounds >= 0:
        raise ValueError(f"num_rounds={num_rounds} must be 0 or more; use steps / interval")
    _require_momentum(momentum)
    # 1 - 0.9 rounds down: without the margin exactly 100 rounds would be too few for 0.9.
    return num_rounds * (1 - momentum) < _MIN_ROUNDS_PER_MEMORY * (1 - 1e-9)


@lru_cache(maxsize=256)
def _limit(is_nesterov: bool, momentum: float, delay_rounds: int, fresh_share: float) -> float:
    """Scan upward for the first unstable rate, in blocks, then bisect down to the edge."""
    fixed, scaled = _polynomials(is_nesterov, momentum, delay_rounds, fresh_share)
    # Well inside: a delay of n rounds keeps the limit above (1-mu) / (n+1). The scan ends, because
    # with all roots inside |P(1)| = x is at most 2^degree.
    stable = (1 - momentum) / (8 * (delay_rounds + 1))
    if _radii(np.array([stable]), fixed, scaled)[0] >= 1:
        raise AssertionError(f"the scan starts at an unstable rate, {stable}")
    while True:
        rates = stable * np.power(_SCAN_RATIO, np.arange(1, _SCAN_BLOCK + 1), dtype=np.float64)
        is_unstable = _radii(rates, fixed, scaled) >= 1
        if is_unstable.any():
            break
        stable = float(rates[-1])
    first = int(is_unstable.argmax())
    stable = float(rates[first - 1]) if first else stable
    return _bisect(stable, float(rates[first]), fixed, scaled)


def _polynomials(
    is_nesterov: bool, momentum: float, delay_rounds: int, fresh_share: float
) -> tuple[_Coefficients, _Coefficients]:
    """Return A and B of the module docstring's `A(z) + x B(z)`, `[n+3]` each; A is monic."""
    power = np.zeros(delay_rounds + 1)
    power[0] = 1.0
    mixed = fresh_share * power
    mixed[-1] += 1 - fresh_share
    rule = [1 + momentum, -momentum] if is_nesterov else [1.0, 0.0]
    fixed = np.convolve([1.0, -1 - momentum, momentum], power)
    scaled = np.convolve(rule, mixed)
    return fixed, np.concatenate([[0.0], scaled])


def _radii(rates: _Coefficients, fixed: _Coefficients, scaled: _Coefficients) -> _Coefficients:
    """Return the largest |root| of `fixed + x * scaled` for every x of `rates`, `[len(rates)]`."""
    degree = len(fixed) - 1
    companion = np.zeros((len(rates), degree, degree))
    companion[:, 0, :] = -(fixed + rates[:, None] * scaled)[:, 1:]
    companion[:, np.arange(1, degree), np.arange(degree - 1)] = 1.0
    return np.abs(np.linalg.eigvals(companion)).max(axis=1)


def _bisect(stable: float, unstable: float, fixed: _Coefficients, scaled: _Coefficients) -> float:
    """Return the edge between a stable and an unstable rate, from the stable side."""
    while not math.isclose(stable, unstable, rel_tol=1e-12):
        middle = (stable + unstable) / 2
        if _radii(np.array([middle]), fixed, scaled)[0] < 1:
            stable = middle
        else:
            unstable = middle
    return stable


def _require_momentum(momentum: float) -> None:
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} must be at least 0 and below 1; use 0.9 or 0.5")
