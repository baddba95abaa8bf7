"""The documents of a file: one of a text file, one per row of JSON lines, Parquet or Arrow.

A row's document is the text in one column (`text`, or what `--text-key` names). Arrow files are
those of a dataset that Hugging Face's datasets has saved (`save_to_disk`), which names them in its
state.json. Nothing is downloaded, and rows are read as they are needed.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

TEXT_KEY = "text"
_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_ROWS_AT_A_TIME = 1024
_STATE, _SPLITS = "state.json", "dataset_dict.json"


def has_rows(path: Path) -> bool:
    """Whether a file holds a document per row, and no text as a whole."""
    return path.name.endswith((*_LINES, ".parquet")) or (
        path.suffix == ".arrow" and _is_saved_dataset(path.parent)
    )


def read_rows(path: Path, text_key: str) -> Iterator[str]:
    """Yield the texts of a file's rows, in order; a row without text is "".

    ValueError names the file, the row and what is wrong with it, ModuleNotFoundError what to
    install.
    """
    if path.suffix == ".parquet":
        yield from _of_batches(path, text_key, _parquet_batches(path))
    elif path.suffix == ".arrow":
        yield from _of_batches(path, text_key, _arrow_batches(path))
    else:
        yield from _read_lines(path, text_key)


def files_of_saved_dataset(directory: Path, names: list[str]) -> list[str]:
    """Return which names in a directory are read: of a saved dataset those with its rows."""
    if _SPLITS in names:
        splits = _read_json(directory / _SPLITS).get("splits", [])
        if len(splits) > 1:
            raise ValueError(
                f"{directory} is a saved dataset with the splits {', '.join(splits)}: name the one "
                f"to read, such as {directory / splits[0]}"
            )
        return [name for name in names if name != _SPLITS]
    if not _is_saved_dataset(directory):
        return names
    entries: list[dict[str, str]] = _read_json(directory / _STATE)["_data_files"]
    return [entry["filename"] for entry in entries]


def _is_saved_dataset(directory: Path) -> bool:
    state = directory / _STATE
    return state.is_file() and "_data_files" in _read_json(state)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        return {}  # of somebody else
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _read_lines(path: Path, text_key: str) -> Iterator[str]:
    opened: Any = gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
    with opened as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"line {number} of {path}"
            try:
                row: Any = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{where} is not valid JSON: {error}; mend or remove it") from None
            if not isinstance(row, dict):
                raise ValueError(f'{where} must hold an object, such as {{"{text_key}": "..."}}')
            known = cast("dict[str, Any]", row)
            if text_key not in known:
                raise _no_such_key(where, text_key, list(known))
            yield _text(known[text_key], where, text_key)


def _of_batches(path: Path, text_key: str, batches: Iterator[Any]) -> Iterator[str]:
    """Yield one column of batches of rows."""
    number = 0
    for batch in batches:
        if text_key not in batch.schema.names:
            raise _no_such_key(str(path), text_key, batch.schema.names)
        for value in batch.column(text_key).to_pylist():
            number += 1
            yield _text(value, f"row {number} of {path}", text_key)


def _parquet_batches(path: Path) -> Iterator[Any]:
    parquet = _import_pyarrow("parquet", path)
    with parquet.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=_ROWS_AT_A_TIME)


def _arrow_batches(path: Path) -> Iterator[Any]:
    pyarrow = _import_pyarrow("ipc", path)
    with path.open("rb") as file:
        yield from pyarrow.open_stream(file)


def _import_pyarrow(module: str, path: Path) -> Any:
    from importlib import import_module

    try:
        return import_module(f"pyarrow.{module}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{path} needs pyarrow to be read: pip install "dsx-train[data]"', name=error.name
        ) from error


def _text(value: Any, where: str, text_key: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: {text_key!r} holds {type(value).__name__}, and a text is read; give "
            "--text-key the column with the text"
        )
    return value


def _no_such_key(where: str, text_key: str, known: list[str]) -> ValueError:
    return ValueError(
        f"{where} has no {text_key!r}, but {', '.join(map(repr, known)) or 'nothing'}; give "
        "--text-key the one with the text"
    )
