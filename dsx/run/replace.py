"""A framework's function, replaced by one that is given the original.

One that a version does not have is said by its name, and not found out in the midst of a training.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import metadata
from typing import Any

from dsx.run.session import RouteNotTaken


def around(owner: Any, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
    """Let `act(original, *args, **kwargs)` stand in for a module's or class's function.

    Return the original; RouteNotTaken if there is none.
    """
    original = original_of(owner, name)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return act(original, *args, **kwargs)

    setattr(owner, name, replaced)
    return original


def original_of(owner: Any, name: str) -> Any:
    """Return a module's or class's function; RouteNotTaken, which names it, if there is none."""
    original = getattr(owner, name, None)
    if original is not None:
        return original
    where = owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__name__}"
    package = where.partition(".")[0]
    raise RouteNotTaken(
        f"{package} {version_of(package)} has no {where}.{name}, which dsx.run replaces: install a "
        f"version that dsx.run is tested with (docs/trainers.md), or let the script call "
        "dsx.attach(model, optimizer, config=...) itself"
    )


def version_of(package: str) -> str:
    """Return a distribution's version; empty if it is not installed by that name."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
