"""Frozen dataclasses to bytes and back: versioned, bounded, checked field by field.

What is sent comes over a network from peers, so nothing is taken on trust: a message that does not
fit, by size, version, kind, number of fields, type or bound, is refused whole, and `MessageRefused`
says where. The form follows from the annotations: compact JSON, a dataclass as the list of its
fields, one of several dataclasses as its name and that list, a dict as its pairs, sorted.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, NamedTuple, NoReturn

from dsx.comm.membership.bounds import COUNT, INTEGER, MESSAGE_BYTES, Characters

VERSION = 1


class MessageRefused(ValueError):
    """A message that does not fit, and why; nothing of it has been taken."""


class _Form(NamedTuple):
    """How a type is written, and read from what JSON gives; both refuse what does not fit."""

    write: Callable[[Any], Any]
    read: Callable[[Any, str], Any]


def encode(kinds: Any, message: Any) -> bytes:
    """Return a message, of one of the dataclasses in the union `kinds`, as bytes."""
    data = _dumps([VERSION, *_form(kinds).write(message)])
    if len(data) > MESSAGE_BYTES:
        _refuse(type(message).__name__, f"has {len(data)} bytes, of {MESSAGE_BYTES} at most")
    return data


def decode(kinds: Any, data: bytes) -> Any:
    """Return the message, of one of the dataclasses in `kinds`; MessageRefused if it is none."""
    if len(data) > MESSAGE_BYTES:
        _refuse("a message", f"has {len(data)} bytes, of {MESSAGE_BYTES} at most")
    try:
        raw = json.loads(data.decode(), parse_constant=_refuse_constant)
    except MessageRefused:
        raise
    except (ValueError, RecursionError) as error:  # bad UTF-8 is a ValueError, too
        raise MessageRefused(f"a message is not JSON in UTF-8: {error}") from None
    if not isinstance(raw, list) or not raw:
        _refuse("a message", "is not a list that begins with a version")
    version, *rest = raw
    if type(version) is not int or version != VERSION:
        _refuse("a message", f"has version {version!r:.40}, not {VERSION}: run the same dsx")
    return _form(kinds).read(rest, "message")


def encode_value(kind: Any, value: Any) -> bytes:
    """Return a value's bytes without version: to be hashed and counted, not sent."""
    return _dumps(_form(kind).write(value))


_compact = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _dumps(raw: Any) -> bytes:
    return _compact.encode(raw).encode()


@cache
def _form(kind: Any) -> _Form:
    if kind in (int, float, bool):
        return {int: _integer(), float: _scalar(float), bool: _scalar(bool)}[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _text(arguments[1])
    if origin is tuple:
        return _sequence(_form(arguments[0]))
    if origin is dict:
        return _mapping(_form(arguments[0]), _form(arguments[1]))
    if origin in (types.UnionType, typing.Union):
        return _one_of(arguments)
    if dataclasses.is_dataclass(kind):
        return _record(typing.cast(type, kind))
    raise TypeError(f"{kind} has no form in a message")


def _integer() -> _Form:
    def require(raw: Any, where: str, most: int) -> int:
        if type(raw) is not int or not 0 <= raw <= most:
            _refuse(where, f"is {raw!r:.40}, not an integer from 0 to {most}")
        return raw

    def write(value: Any) -> int:
        return require(value, "an integer", 2 * INTEGER)

    def read(raw: Any, where: str) -> int:
        return require(raw, where, INTEGER)

    return _Form(write, read)


def _scalar(kind: type) -> _Form:
    def read(raw: Any, where: str) -> Any:
        if type(raw) is not kind:
            _refuse(where, f"is {raw!r:.40}, not a {kind.__name__}")
        return raw

    def write(value: Any) -> Any:
        return read(kind(value), f"a {kind.__name__}")

    return _Form(write, read)


def _text(bound: Characters) -> _Form:
    def read(raw: Any, where: str) -> str:
        if type(raw) is not str or len(raw) > bound.most:
            _refuse(where, f"is {raw!r:.40}, not a text of at most {bound.most} characters")
        try:
            raw.encode()
        except UnicodeEncodeError:
            _refuse(where, f"is {raw!r:.40}, which is not a text in Unicode")
        return raw

    def write(value: Any) -> str:
        return read(value, "a text")

    return _Form(write, read)


def _sequence(item: _Form) -> _Form:
    def read(raw: Any, where: str) -> tuple[Any, ...]:
        _require_list(raw, where)
        return tuple([item.read(one, where) for one in raw])

    def write(value: Any) -> list[Any]:
        return [item.write(one) for one in _bounded(value)]

    return _Form(write, read)


def _mapping(key: _Form, item: _Form) -> _Form:
    def write(value: dict[Any, Any]) -> list[Any]:
        return [[key.write(k), item.write(v)] for k, v in sorted(_bounded(value).items())]

    def read(raw: Any, where: str) -> dict[Any, Any]:
        _require_list(raw, where)
        found: dict[Any, Any] = {}
        for pair in raw:
            _require_list(pair, where, 2)
            found[key.read(pair[0], where)] = item.read(pair[1], where)
        if list(found) != sorted(found) or len(found) != len(raw):
            _refuse(where, "has keys that are not ascending")
        return found

    return _Form(write, read)


def _record(kind: type) -> _Form:
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(kind)]
    forms = [(name, _form(hints[name]), f"{kind.__name__}.{name}") for name in names]

    def write(value: Any) -> list[Any]:
        return [form.write(getattr(value, name)) for name, form, _ in forms]

    def read(raw: Any, where: str) -> Any:
        _require_list(raw, where, len(forms))
        fields = [form.read(one, at) for one, (_, form, at) in zip(raw, forms, strict=True)]
        try:
            return kind(*fields)
        except ValueError as error:
            raise MessageRefused(f"{where}: {error}") from None

    return _Form(write, read)


def _one_of(kinds: tuple[type, ...]) -> _Form:
    records = {kind.__name__: (kind, _record(kind)) for kind in kinds}

    def write(value: Any) -> list[Any]:
        name = type(value).__name__
        return [name, records[name][1].write(value)]

    def read(raw: Any, where: str) -> Any:
        _require_list(raw, where, 2)
        if type(raw[0]) is not str or raw[0] not in records:
            _refuse(where, f"is of kind {raw[0]!r:.40}, not one of {', '.join(records)}")
        return records[raw[0]][1].read(raw[1], raw[0])

    return _Form(write, read)


def _bounded(value: Any) -> Any:
    if len(value) > COUNT:
        _refuse("a list", f"has {len(value)} items, of {COUNT} at most")
    return value


def _require_list(raw: Any, where: str, length: int | None = None) -> None:
    if type(raw) is not list:
        _refuse(where, f"is {raw!r:.40}, not a list")
    if length is not None and len(raw) != length:
        _refuse(where, f"has {len(raw)} parts, not {length}")
    _bounded(raw)


def _refuse_constant(name: str) -> NoReturn:
    _refuse("a message", f"holds {name}, which is no finite number")


def _refuse(where: str, why: str) -> NoReturn:
    raise MessageRefused(f"{where} {why}")
