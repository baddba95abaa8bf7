"""A method of Lightning's that is replaced by one of dsx, which is given the original."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from dsx.run import replace


def around(cls: Any, name: str, act: Callable[..., Any]) -> None:
    """Let `act(original, self, ...)` stand in for a method; `original` takes what follows self.

    RouteNotTaken names a method that this version has not.
    """

    def of_self(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return act(functools.partial(original, self), self, *args, **kwargs)

    replace.around(cls, name, of_self)


def around_property(cls: Any, name: str, get: Callable[[Callable[[], Any], Any], Any]) -> None:
    """Let `get(original, self)` stand in for a property that is only read."""
    kept = replace.original_of(cls, name)

    def read(self: Any) -> Any:
        return get(lambda: kept.fget(self), self)

    setattr(cls, name, property(read, doc=kept.__doc__))


def known_to(function: Callable[..., Any], **given: Any) -> dict[str, Any]:
    """Return those of the arguments that this version's function has."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in given.items() if name in parameters}


def modules_of(root: str) -> Callable[[str], Any]:
    """Return what gives the modules below `lightning.pytorch` or `pytorch_lightning`, by name."""
    return lambda name: sys.modules[f"{root}.{name}"]
