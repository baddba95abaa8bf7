"""Limits of numbers that stand in annotations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import pytest
from annotated_types import Ge

from dsx.core.checks import require_bounds


@dataclass(frozen=True)
class Choice:
    name: Annotated[str, "for the reader only"] = "a"
    share: Annotated[float, "for the reader only"] = math.inf
    count: Annotated[int, Ge(1), "none is nothing"] = 1


def test_an_annotation_without_limits_allows_everything() -> None:
    require_bounds("mine", Choice())


def test_an_annotation_with_limits_says_why() -> None:
    with pytest.raises(ValueError, match="mine.count=0 must be at least 1: none is nothing"):
        require_bounds("mine", Choice(count=0))
