"""Which of a test's parameters run by default; the others run with `pytest -m ci`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def by_default(values: Iterable[Any], *quick: Any, of: Callable[[Any], Any] = lambda v: v) -> Any:
    """Return the values as parameters, those not among `quick` marked; `of` is what is looked at.

    ValueError if one of `quick` is no value: what was renamed would leave the default suite.
    """
    values = list(values)
    if missing := set(quick) - {of(value) for value in values}:
        raise ValueError(f"{sorted(missing, key=str)} are not among the parameters")
    marks = {True: (), False: (pytest.mark.ci,)}
    return [
        pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=marks[of(v) in quick])
        for v in values
    ]


def in_turn(values: Iterable[Any], others: Iterable[Any]) -> Any:
    """Return all pairs as parameters; by default run every value, each with one other in turn."""
    others = list(others)
    return [
        pytest.param(value, other, marks=() if turn == place % len(others) else (pytest.mark.ci,))
        for place, value in enumerate(values)
        for turn, other in enumerate(others)
    ]
