"""Limits of numbers that stand in annotations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import pytest
from annotated_types import Ge, Interval
from pydantic import Field

from dsx.core.checks import require_bounds


@dataclass(frozen=True)
class Choice:
    name: Annotated[str, "for the reader only"] = "a"
    share: Annotated[float, "for the reader only"] = math.inf
    count: Annotated[int, Ge(1), "none is nothing"] = 1
    level: Annotated[float, Interval(ge=0, le=2)] = 1.0
    depth: Annotated[int, Field(ge=3)] = 3


def test_an_annotation_without_limits_allows_everything() -> None:
    require_bounds("mine", Choice())


def test_an_annotation_with_limits_says_why() -> None:
    with pytest.raises(ValueError, match="mine.count=0 must be at least 1: none is nothing"):
        require_bounds("mine", Choice(count=0))


def test_limits_in_groups_are_limits() -> None:
    with pytest.raises(ValueError, match="mine.level=9 must be at least 0 and at most 2"):
        require_bounds("mine", Choice(level=9))
    with pytest.raises(ValueError, match="mine.depth=2 must be at least 3"):
        require_bounds("mine", Choice(depth=2))
