from __future__ import annotations

import pytest

from dsx.core.units import format_bytes, format_seconds

GIB = 2**30


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1 kB"),
        (1000, "1 kB"),
        (53_449_000, "53.4 MB"),
        (99_960_000, "100 MB"),
        (999_400_000, "999 MB"),
        (999_600_000, "1 GB"),
        (2.402e12, "2.4 TB"),
        (4.2e15, "4.2 PB"),
    ],
)
def test_three_digits(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_four_digits() -> None:
    assert format_bytes(5_690_123, 4) == "5.69 MB"
    assert format_bytes(999_949_000, 4) == "999.9 MB"
    assert format_bytes(999_960_000, 4) == "1 GB"


@pytest.mark.parametrize(
    ("count", "text"),
    [(5, "5 B"), (2048, "2 KiB"), (1010 * 2**20, "0.986 GiB"), (26.6 * GIB, "26.6 GiB")],
)
def test_powers_of_1024(count: float, text: str) -> None:
    """No power of ten is written for what lies between 1000 and 1024."""
    assert format_bytes(count, binary=True) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123456, "0.01235 s"), (67.549, "67.55 s"), (999.4, "999.4 s"), (3593.6, "3,594 s")],
)
def test_seconds_have_four_digits_or_all_before_the_point(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
