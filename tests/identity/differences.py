"""Where two JSON values differ, by name. Without torch, so that a comparison starts at once."""

from __future__ import annotations

from typing import Any


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Name every place where two JSON values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        found: list[str] = []
        for key in [*a, *(key for key in b if key not in a)]:
            where = f"{path} > {key}" if path else key
            if key not in a or key not in b:
                found.append(f"{where}: only in the {'second' if key not in a else 'first'}")
            else:
                found += differences(a[key], b[key], where)
        return found
    if isinstance(a, list) and isinstance(b, list):
        pairs = enumerate(zip(a, b, strict=False))
        found = [f for i, (x, y) in pairs for f in differences(x, y, f"{path}[{i}]")]
        if len(a) != len(b):
            found.append(f"{path}: {len(a)} entries and {len(b)}")
        return found
    return [] if type(a) is type(b) and a == b else [f"{path}: {a!r} and {b!r}"]


def count(value: Any) -> int:
    """Return how many single values a JSON value holds."""
    if isinstance(value, dict):
        return sum(count(v) for v in value.values())
    if isinstance(value, list):
        return sum(count(v) for v in value)
    return 1
