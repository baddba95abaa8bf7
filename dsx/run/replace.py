"""A framework's function, replaced by one that is given the original.

One that a version does not have is said by its name, and not found out in the midst of a training.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dsx.core.requirements import installed_version
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
    kind = owner if isinstance(owner, (ModuleType, type)) else type(owner)
    where = kind.__name__ if inspect.ismodule(kind) else f"{kind.__module__}.{kind.__name__}"
    package = where.partition(".")[0]
    version = installed_version(package) or "of this version"
    raise RouteNotTaken(
        f"{package} {version} has no {where}.{name}, which dsx.run replaces: install a version "
        "that dsx.run is tested with (docs/trainers.md), or let the script call dsx.attach(model, "
        "optimizer, config=...) itself"
    )
