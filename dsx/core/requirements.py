"""Which versions of other packages dsx-train is tested with, by its own metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

PACKAGE = "dsx-train"


@dataclass(frozen=True)
class Outside:
    """A package outside of the range that is `wanted`, such as `torch>=2.6`."""

    name: str
    version: str
    wanted: str
    is_extra: bool


def installed_version(name: str) -> str | None:
    """Return a distribution's version; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def outside_of_ranges(found: Mapping[str, str]) -> list[Outside] | None:
    """Return which of the packages, with their versions, lie outside; None without metadata."""
    try:
        required = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    own = {_canonical(name): version for name, version in found.items()}
    outside: list[Outside] = []
    for line in required:
        name, ranges, is_extra = _requirement(line)
        version = own.get(_canonical(name))
        if version is not None and not all(_holds(version, bound) for bound in ranges):
            outside.append(Outside(name, version, f"{name}{','.join(ranges)}", is_extra))
    return outside


def _canonical(name: str) -> str:
    """Return a distribution's name as indexes compare them: pytorch_lightning's has a hyphen."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _requirement(line: str) -> tuple[str, list[str], bool]:
    """Return the name, the bounds and whether it is an extra's, of `torch>=2.6; extra == "x"`."""
    said, _, marker = line.partition(";")
    parts = re.fullmatch(r"([\w.-]+)(?:\[[^\]]*\])?\s*\(?([^)]*)\)?", said.strip())
    assert parts is not None  # as setuptools writes them
    name, bounds = parts.groups()
    return name, sorted(b.strip() for b in bounds.split(",") if b.strip()), "extra" in marker


def _holds(version: str, bound: str) -> bool:
    """Whether a version lies within `>=2.6` or `<0.20`; of a version the numbers count."""
    parts = re.fullmatch(r"(>=|<)\s*([\d.]+)", bound)
    if parts is None:
        return True  # none of dsx-train's own
    sign, limit = parts.groups()
    own, other = ([int(n) for n in re.findall(r"\d+", v)] for v in (version, limit))
    own = own[: len(other)]
    return own >= other if sign == ">=" else own < other
