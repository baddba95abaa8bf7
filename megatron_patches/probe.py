"""Find what is to be wrapped, and refuse a Megatron in which it is not what it was.

Nothing is guessed from a version number: the names and parameters that a patch relies on are
looked up, and what is missing is named beside the releases that have it. Names of Megatron-LM's
that are not meant for others are in this file alone.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

CHECKED = "Megatron-LM core_v0.13.1, 0.14.0, 0.16.1, 0.17.1, 0.19.0, main of August 2026"
_OLDEST, _NEWEST = "core_v0.8.0", "main of August 2026"  # that were read
_SINCE = {"checkpoint_and_decide_exit": "core_v0.11.0"}  # what the oldest does not have


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
        raise UnknownMegatron(f"{where} has no {name}, {since(name)}; checked: {CHECKED}")
    taken = inspect.signature(found).parameters
    missing = [parameter for parameter in parameters if parameter not in taken]
    if missing:
        raise UnknownMegatron(
            f"{where}.{name} takes ({', '.join(taken)}) and not {', '.join(missing)}; "
            f"checked: {CHECKED}"
        )
    return found


def since(name: str) -> str:
    """Return in which releases a name that a tree lacks is to be found."""
    return f"which is there from {_SINCE.get(name, _OLDEST)} to {_NEWEST}"


def training() -> Any:
    """Return `megatron.training.training`, in whose namespace the loop finds its functions."""
    return module("megatron.training.training")


def arguments_in_force() -> Any:
    """Return Megatron's parsed arguments."""
    return module("megatron.training.global_vars").get_args()


def start_of_training(loop: Any) -> float:
    """Return when the training began, in seconds, by which the loop measures its time limit."""
    name = "_TRAIN_START_TIME"
    if not hasattr(loop, name):
        raise UnknownMegatron(f"{loop.__name__} has no {name}, {since(name)}; checked: {CHECKED}")
    return float(getattr(loop, name))


def tokenizer() -> Any:
    """Return the tokenizer that Megatron has built; None where there is none."""
    return getattr(module("megatron.training.global_vars"), "_GLOBAL_TOKENIZER", None)
