"""Plain values, as JSON has them, of what a program gives in a dict.

A path counts as its text and numpy's numbers as numbers. Of the "dsx" block everything else is
refused, by the key it stands at; of the rest of a DeepSpeed configuration, which is not dsx's to
read, it is told by its name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, cast

from dsx.config.files import ConfigError, shown

_MOST = 2**53  # beyond that JSON's readers disagree about whole numbers
_DEEPEST = 20  # no key of a block is
_ALLOWED = "a text, a number, true, false, null, a list or an object"


def plain_block(value: Any, where: str = "dsx", depth: int = 0) -> Any:
    """Return what stands at the key `where`; ConfigError, naming that key, for what no JSON has."""
    if depth > _DEEPEST:
        raise ConfigError(
            f"{where.split('[')[0][:80]} holds more than {_DEEPEST} objects or lists in each other "
            "(or itself), and no key of dsx has as many; leave it out"
        )
    if isinstance(value, Mapping):
        entries = cast(Mapping[Any, Any], value).items()
        for key, _ in entries:
            _require_key(where, key)
        return {key: plain_block(one, f"{where}.{key}", depth + 1) for key, one in entries}
    if isinstance(value, list | tuple):
        entries = enumerate(cast("Iterable[Any]", value))
        return [plain_block(one, f"{where}[{index}]", depth + 1) for index, one in entries]
    found = _plain_scalar(value)
    if isinstance(found, str):
        _require_text(where, found)
    elif isinstance(found, int) and abs(found) > _MOST:
        raise ConfigError(
            f"{where}={shown(found)} must be at most {_MOST} (2^53), as every number here; write "
            "a smaller one"
        )
    elif found is not None and not isinstance(found, bool | int | float):
        raise ConfigError(
            f"{where}={shown(value)} is of the type {_name(value)}, and must be {_ALLOWED}; write "
            "it as one of these"
        )
    return found


def told(value: Any, depth: int = 0) -> Any:
    """Return it as JSON can tell it: what is no plain value by the name of its type."""
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, Mapping):
        entries = cast(Mapping[Any, Any], value).items()
        return {str(key): told(one, depth + 1) for key, one in entries}
    if isinstance(value, list | tuple):
        return [told(one, depth + 1) for one in cast("Iterable[Any]", value)]
    if isinstance(value, set | frozenset):
        return sorted(str(told(one, depth + 1)) for one in cast("Iterable[Any]", value))
    found = _plain_scalar(value)
    if found is None or isinstance(found, bool | int | float | str):
        return found
    text = str(found)  # torch.bfloat16 is its own name; an object's has its place in memory
    return _name(value) if " at 0x" in text else text


def _plain_scalar(value: Any) -> Any:
    """Return a path as text, and numbers of numpy as Python's; all else as it is."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        path = os.fspath(cast("os.PathLike[str]", value))
        return path
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if type(value).__module__ == "numpy" and type(value).__name__.startswith("bool"):
        return bool(value)
    return value


def _require_key(where: str, key: Any) -> None:
    if not isinstance(key, str):
        raise ConfigError(
            f"{where} has the key {shown(key)} of the type {_name(key)}; keys must be texts: write "
            "one of those that `dsx config reference` lists"
        )
    _require_text(f"a key of {where}", key)


def _require_text(where: str, text: str) -> None:
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(
            f"{where}={shown(text)} must be a text of whole characters, and it has half of a "
            "surrogate pair; write the character itself"
        )


def _name(value: Any) -> str:
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
