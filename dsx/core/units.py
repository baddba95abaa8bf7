"""Numbers of bytes, and of seconds, as people read them."""

from __future__ import annotations

_PREFIXES = ("", "k", "M", "G", "T", "P")


def format_bytes(count: float, digits: int = 3, *, binary: bool = False) -> str:
    """Return a number of bytes with at most three digits before the point.

    In powers of 1000, or of 1024 if `binary`: `format_bytes(53_400_000)` is "53.4 MB".
    """
    size, place = float(count), 0
    while abs(size) >= 1000 - 0.5 * 10 ** (3 - digits) and place < len(_PREFIXES) - 1:
        size, place = size / (1024 if binary else 1000), place + 1
    unit = f"{_PREFIXES[place].upper()}iB" if binary and place else f"{_PREFIXES[place]}B"
    return f"{size:.{digits}g} {unit}"


def format_seconds(seconds: float) -> str:
    """Return seconds with four digits, or as many as there are before the point, by thousands."""
    return f"{seconds:,.0f} s" if seconds >= 1000 else f"{seconds:.4g} s"
