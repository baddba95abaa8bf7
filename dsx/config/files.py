"""Files of the user: JSON that is read, without torch so that a plan can, and places to write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast


class ConfigError(ValueError):
    """A "dsx" block that cannot be used; the message gives value, what is allowed, and the fix."""


def read_json(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a DeepSpeed JSON as it is written; ConfigError if there is none."""
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"{source!r} is no DeepSpeed configuration: give the path of its JSON file, or its "
            'content as a dict, {"dsx": {...}}'
        )
    try:
        document = json.loads(Path(source).read_text())
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ConfigError(f"no config file at {source}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(document, Mapping):
        raise ConfigError(f"{source} must hold a JSON object")
    return cast(Mapping[str, Any], document)


def require_place(option: str, path: Path | None) -> None:
    """Raise ValueError unless a file can be put there; before what takes time to find out."""
    if path is not None and path.is_dir():
        raise ValueError(f"{option} {path}: is a directory; give a file in it")
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: there is no such directory; make it first")
