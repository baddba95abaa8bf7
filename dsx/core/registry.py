"""Every choice of a method by its name: what ships and what is added go through the same line.

A choice on an axis is a frozen dataclass that keeps the axis's contract; a preset is a function of
the number of clusters that returns a method. One line above either makes it known:

    @register("delay", "blocking")
    @dataclass(frozen=True)
    class Blocking(DelayPolicy): ...

Names become values of the configuration ("delay": {"type": "blocking"}), of records and of
checkpoints, so a name means one class for the life of a process.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from dsx.core.checks import nearest

# Each axis of a method, and the key of its configuration that holds the name.
SELECTORS: Mapping[str, str] = {
    "fragments": "by",
    "schedule": "type",
    "delay": "type",
    "outer_optimizer": "type",
    "staleness": "type",
    "compression": "type",
    "control": "type",
}
PRESET = "preset"
# axis: {old name of a choice: today's}; both mean one choice, wherever either is read.
FORMER: Mapping[str, Mapping[str, str]] = {
    "delay": {"replace": "blocking", "blend": "streaming"},
}
_KINDS = (*SELECTORS, PRESET)
_NAME = re.compile(r"[a-z][a-z0-9_]*")

C = TypeVar("C", bound=type)
T = TypeVar("T", bound=Callable[..., Any])
_known: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS}
_contracts: dict[str, type] = {}


def contract(axis: str) -> Callable[[C], C]:
    """Say, above a Protocol, that every choice on `axis` has to keep it."""

    def declare(protocol: C) -> C:
        _contracts[axis] = protocol
        return protocol

    return declare


def register(axis: str, name: str | None = None) -> Callable[[T], T]:
    """Make a class known as a choice on `axis`, or a function as a preset; use it as a decorator.

    `axis` is "fragments", "schedule", "delay", "outer_optimizer", "staleness", "compression",
    "control" or "preset". `name` is what a configuration calls it; left out, it is that of the
    function, or that of the class in lower case with underscores.

    Raises ValueError for an axis that does not exist, a name that is none or is taken, and
    TypeError for what is no string, or cannot be such a choice: an axis takes frozen dataclasses
    with the members of its contract, "preset" a function of the number of clusters that returns a
    `Method`.
    """
    if not isinstance(axis, str) or not isinstance(name, str | None):  # pyright: ignore
        raise TypeError(
            f"register({axis!r}, {name!r}): an axis and a name are strings, as in "
            '@dsx.register("delay") or @dsx.register("delay", "name")'
        )
    if axis not in _KINDS:
        raise ValueError(f"register({axis!r}): there is no such axis{nearest(axis, _KINDS)}")

    def enter(choice: T) -> T:
        called = name if name is not None else _snake_case(getattr(choice, "__name__", ""))
        where = f"register({axis!r}, {called!r})"
        if not _NAME.fullmatch(called):
            raise ValueError(
                f"{where}: a name has small letters, digits and underscores, and begins with a "
                "letter; give one as the second argument"
            )
        if axis == PRESET:
            _require_preset(where, choice)
        else:
            _require_choice(where, axis, choice)
        _require_free(where, axis, called, choice)
        _known[axis][called] = choice
        return choice

    return enter


class Names(Mapping[str, T]):
    """What is registered on one axis, as it is at every look; `prepare` is called before each."""

    def __init__(self, axis: str, prepare: Callable[[], None]) -> None:
        self._axis = axis
        self._prepare = prepare

    def __getitem__(self, name: str) -> T:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def of(self, choice: Any) -> str:
        """Return the name of a choice's class; ValueError if that is not registered."""
        for name, kind in self._all().items():
            if type(choice) is kind:
                return name
        kind = type(choice)
        raise ValueError(
            f"{self._axis}={choice!r}: {kind.__module__}.{kind.__qualname__} has no name, which "
            "configurations, records and checkpoints need; put "
            f"@dsx.register({self._axis!r}) above the class"
        )

    def _all(self) -> dict[str, T]:
        self._prepare()
        found: dict[str, T] = _known[self._axis]
        return found if self._axis == PRESET else dict(sorted(found.items()))


def _require_choice(where: str, axis: str, choice: Any) -> None:
    """Raise TypeError unless `choice` is a frozen dataclass with what its axis asks for."""
    if not isinstance(choice, type):
        raise TypeError(f"{where} stands above a class, not {choice!r}")
    if not dataclasses.is_dataclass(choice) or "__dataclass_params__" not in vars(choice):
        raise TypeError(
            f"{where}: {choice.__qualname__} is no dataclass; put @dataclass(frozen=True) between "
            "the two, since its fields are the keys of the configuration"
        )
    if not choice.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(
            f"{where}: {choice.__qualname__} can be changed, and a method must not; use "
            "@dataclass(frozen=True)"
        )
    fields = {field.name for field in dataclasses.fields(choice)}
    if SELECTORS[axis] in fields:
        raise TypeError(
            f"{where}: {choice.__qualname__} has a field {SELECTORS[axis]!r}, the key that holds "
            "the name; call the field something else"
        )
    wanted = _contracts[axis]
    inherited = getattr(choice, "__abstractmethods__", frozenset[str]())
    missing = [
        member
        for member in _members(wanted)
        if member in inherited or not (member in fields or hasattr(choice, member))
    ]
    if missing:
        raise TypeError(
            f"{where}: {choice.__qualname__} does not say {', '.join(missing)}; see "
            f"{wanted.__module__}.{wanted.__qualname__}, which gives most members if inherited"
        )


def _require_preset(where: str, choice: Any) -> None:
    """Raise TypeError unless `choice` can be called with the number of clusters alone."""
    if isinstance(choice, type) or not callable(choice):
        raise TypeError(f"{where} stands above a function of the number of clusters")
    try:
        inspect.signature(choice).bind(2)
    except TypeError as error:
        raise TypeError(
            f"{where}: a preset is called with the number of clusters, and this function is not: "
            f"{error}"
        ) from None


def _require_free(where: str, axis: str, name: str, choice: Any) -> None:
    """Raise ValueError if the name is or was another's, or the choice has one; reloads replace."""
    today = FORMER.get(axis, {}).get(name)
    if today is not None:
        raise ValueError(f"{where}: {today!r} had this name before; choose another one")
    taken = _known[axis].get(name)
    if taken is not None and _place(taken) != _place(choice):
        raise ValueError(f"{where}: {_place(taken)} has this name already; choose another one")
    for other, known in _known[axis].items():
        if known is choice and other != name:
            raise ValueError(f"{where}: {_place(choice)} is registered as {other!r}; use one name")


def _place(choice: Any) -> str:
    return f"{choice.__module__}.{choice.__qualname__}"


def _members(protocol: type) -> list[str]:
    """Return the public members that a Protocol declares."""
    return [
        name
        for name in {**inspect.get_annotations(protocol), **vars(protocol)}
        if not name.startswith("_")
    ]


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
