"""Files of the user: JSON that is read, without torch so that a plan can, and places to write."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

_MOST_BYTES = 16 * 2**20
_MOST_DIGITS = 400  # of a whole number; more than any float has
_MARKS = {  # the longer ones first, which begin as the shorter ones do
    codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16", codecs.BOM_UTF8: "UTF-8 with a byte-order mark",
}  # fmt: skip
_HINTS = {
    r"//|/\*|\#": "JSON has no comments; remove them",
    r"'": 'JSON has double quotes only; write "..."',
    r"True\b": "write true", r"False\b": "write false", r"None\b": "write null",
    r"\.\d|\+": "write numbers as 0.5 or 5",
}  # fmt: skip


class ConfigError(ValueError):
    """A "dsx" block that cannot be used; the message gives value, what is allowed, and the fix."""


def read_json(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a DeepSpeed JSON as it is written; ConfigError if there is none."""
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"{shown(source)} is no DeepSpeed configuration: give the path of its JSON file, or "
            'its content as a dict, {"dsx": {...}}'
        )
    document = read_any_json(source)
    if not isinstance(document, Mapping):
        raise ConfigError(
            f"{_name(source)} must hold a JSON object, not {shown(document)}; write "
            '{"dsx": {...}}'
        )
    return cast(Mapping[str, Any], document)


def read_any_json(source: str | PathLike[str]) -> Any:
    """Return what a JSON file holds; ConfigError, with the place and the fix, if it is none."""
    name = _name(source)
    text = read_text(source)
    if not text.strip():
        raise ConfigError(f'{name} is not valid JSON: it is empty; write {{"dsx": {{...}}}}')
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_whole_number)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} is not valid JSON: {_explain(text, error)}") from error
    except RecursionError as error:
        raise ConfigError(
            f"{name} is not valid JSON for dsx: it holds hundreds of objects or lists in each "
            "other; a configuration has a few: write it anew"
        ) from error
    except ValueError as error:  # of the two functions above
        raise ConfigError(f"{name} is not valid JSON for DeepSpeed and dsx: {error}") from error


def read_text(source: str | PathLike[str]) -> str:
    """Return the text of a file that a user has written; ConfigError if there is none."""
    return _decode(_name(source), _read_bytes(_name(source), Path(source)))


def _name(source: str | PathLike[str]) -> str:
    return shorten(os.fspath(source)) or "''"


def require_place(option: str, path: Path | None) -> None:
    """Raise ValueError unless a file can be put there; before what takes time to find out."""
    if path is None:
        return
    try:
        if path.is_dir():
            raise ValueError(f"{option} {path}: is a directory; give a file in it")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"{option} {path}: there is no such directory; make it first")
    except OSError as error:  # a name that is too long
        raise ValueError(
            f"{option} {shorten(str(path))}: {error.strerror}; give another file"
        ) from error


def require_folder(key: str, directory: str) -> None:
    """Raise ConfigError unless a folder can be made there, or is there, as far as one can see."""
    for path in (Path(directory), *Path(directory).absolute().parents):
        try:
            if path.is_dir():
                return
            if os.path.lexists(path):
                raise ConfigError(
                    f"{key}={shown(directory)} must be a folder, or a name that is free, and "
                    f"{path} is a file; give another one"
                )
        except OSError as error:
            raise ConfigError(
                f"{key}={shown(directory)} must be a folder that can be made: "
                f"{error.strerror}; give another one"
            ) from error


def shown(value: Any) -> str:
    """Return a value as it is shown in a message: on one line, and not all of a long one."""
    try:
        text = repr(value)
    except Exception:  # whatever an object of somebody else's raises
        text = f"<{type(value).__qualname__}>"
    return shorten(" ".join(text.split()))


def shorten(text: str, most: int = 120) -> str:
    """Return a text, or the beginning of one that is long."""
    return text if len(text) <= most else f"{text[: most - 20]}... ({len(text)} characters)"


def _read_bytes(name: str, path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            found = file.read(_MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(
            f"no config file at {name}: give the path of one, from {Path.cwd()} or whole"
        ) from error
    except IsADirectoryError as error:
        inside = sorted(path.glob("*.json"))
        which = f", such as {inside[0]}" if inside else ""
        raise ConfigError(
            f"no config file at {name}, which is a folder; give a file{which}"
        ) from error
    except (OSError, ValueError) as error:  # the latter for what can be no name of a file
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"no config file at {name!r} that can be opened: {reason}; give another file, or the "
            "right to read this one"
        ) from error
    if len(found) > _MOST_BYTES:
        raise ConfigError(
            f"{name} is no file of settings: it has more than {_MOST_BYTES // 2**20} MiB; give "
            "another"
        )
    return found


def _decode(name: str, data: bytes) -> str:
    for mark, encoding in _MARKS.items():
        if data.startswith(mark):
            raise ConfigError(f"{name} is {encoding}, which is not read; save it as plain UTF-8")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is no text: {error}; save it as plain UTF-8, or give another file"
        ) from error
    if "\0" in text:
        raise ConfigError(
            f"{name} is no text: it holds bytes of value 0; save it as plain UTF-8, or give "
            "another file"
        )
    return text


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"the key {shown(twice)} stands twice in one object; keep one of the two")
    return found


def _whole_number(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(
            f"a number of {len(text)} digits, {text[:12]}..., and at most {_MOST_DIGITS} are "
            "allowed; write a smaller one"
        )
    return int(text)


def _explain(text: str, error: json.JSONDecodeError) -> str:
    """Return where and why, with what to write instead where that is plain."""
    place = f"line {error.lineno} column {error.colno}"
    before, rest = text[: error.pos].rstrip(), text[error.pos :].lstrip()
    if rest[:1] in ("}", "]") and before.endswith(","):
        return f"{place}: a comma before {rest[0]}; remove it"
    if before.endswith(",") and error.msg.startswith("Illegal trailing comma"):
        before = before[:-1]
    for pattern, hint in _HINTS.items():
        if re.match(pattern, rest):
            return f"{place}: {hint}"
    if not rest:
        return f"{place}: the file ends in the middle; close what is open"
    return f"{place}: {error.msg}, and {shown(rest[:12])} comes; write it as JSON has it"
