"""Find what is to be wrapped, and refuse a Megatron in which it is not what it was.

Nothing is guessed from a version number: the names and parameters that a patch relies on are
looked up, and what is missing is named beside the releases that were checked.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

CHECKED = "Megatron-LM core_v0.12.0, core_v0.16.1, core_v0.19.0 and main of August 2026"


class UnknownMegatron(RuntimeError):
    """This Megatron-LM lacks something that a patch wraps, or has it in another shape."""


def module(*names: str) -> Any:
    """Import the first of these modules that there is."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise  # something that the module itself needs
    raise UnknownMegatron(
        f"no module {' or '.join(names)}: put the Megatron-LM tree first on PYTHONPATH, before an "
        f"installed megatron-core (checked: {CHECKED})"
    )


def function(owner: Any, name: str, parameters: Sequence[str] = ()) -> Callable[..., Any]:
    """Return a function of a module or class that takes at least these parameters."""
    found = getattr(owner, name, None)
    where = getattr(owner, "__name__", str(owner))
    if not callable(found):
        raise UnknownMegatron(f"{where} has no {name}; checked: {CHECKED}")
    taken = inspect.signature(found).parameters
    missing = [parameter for parameter in parameters if parameter not in taken]
    if missing:
        raise UnknownMegatron(
            f"{where}.{name} takes ({', '.join(taken)}) and not {', '.join(missing)}; "
            f"checked: {CHECKED}"
        )
    return found


def training() -> Any:
    """Return `megatron.training.training`, in whose namespace the loop finds its functions."""
    return module("megatron.training.training")


def arguments_in_force() -> Any:
    """Return Megatron's parsed arguments."""
    return module("megatron.training.global_vars").get_args()
