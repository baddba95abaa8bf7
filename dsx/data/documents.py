"""The documents of a file: one of a text file, one per row of JSON lines, Parquet or Arrow.

A row's document is the text in one column (`text`, or what `--text-key` names). Arrow files are
those of a dataset that Hugging Face's datasets has saved (`save_to_disk`), which names them in its
state.json. Nothing is downloaded, and rows are read as they are needed: all of them, or a stretch,
so that several processes share a file.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

TEXT_KEY = "text"
_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_ROWS_AT_A_TIME = 1024
_SKIP = "skip such rows (--skip-bad)"
_STATE, _SPLITS = "state.json", "dataset_dict.json"


class Stretch(NamedTuple):
    """A part of a file with rows: from `start` to `stop`, None for its end.

    In bytes of JSON lines: the lines whose first byte lies in it. Else in groups of rows, as
    Parquet and Arrow have them. Before it there are `rows` rows, and `lines` lines.
    """

    start: int = 0
    stop: int | None = None
    rows: int = 0
    lines: int = 0


WHOLE = Stretch()


def has_rows(path: Path) -> bool:
    """Whether a file holds a document per row, and no text as a whole."""
    return path.name.endswith((*_LINES, ".parquet")) or (
        path.suffix == ".arrow" and _is_saved_dataset(path.parent)
    )


def is_cut_by_bytes(path: Path) -> bool:
    """Whether stretches of a file are in bytes: of JSON lines that are not compressed."""
    return path.name.endswith((".jsonl", ".ndjson"))


def rows_of_groups(path: Path) -> list[int]:
    """Return the number of rows of each group in a Parquet or Arrow file; [] for others."""
    if path.suffix == ".parquet":
        with _import_pyarrow("parquet", path).ParquetFile(path) as file:
            groups = range(file.metadata.num_row_groups)
            return [file.metadata.row_group(group).num_rows for group in groups]
    if path.suffix == ".arrow":
        return [batch.num_rows for batch in _arrow_batches(path, WHOLE)]
    return []


def count_lines(path: Path, stretch: Stretch) -> tuple[int, int]:
    """Return how many lines and how many rows a stretch of JSON lines has; empty ones are none."""
    lines = rows = 0
    with path.open("rb") as file:
        for line in _lines_of(file, stretch):
            lines += 1
            rows += bool(line.strip())
    return lines, rows


def read_rows(path: Path, text_key: str, stretch: Stretch = WHOLE) -> Iterator[str | ValueError]:
    """Yield the texts of a file's rows, in order; a row without text is "".

    In the place of a row that is bad its error is yielded, which names the file, the row and what
    is wrong with it. ValueError for a file without the column, ModuleNotFoundError says what to
    install.
    """
    if path.suffix == ".parquet":
        yield from _of_batches(path, text_key, _parquet_batches(path, stretch), stretch.rows)
    elif path.suffix == ".arrow":
        yield from _of_batches(path, text_key, _arrow_batches(path, stretch), stretch.rows)
    else:
        yield from _read_lines(path, text_key, stretch)


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


def _lines_of(file: Any, stretch: Stretch) -> Iterator[bytes]:
    """Yield the lines whose first byte lies in a stretch."""
    place = stretch.start
    if place:
        file.seek(place - 1)
        place += len(file.readline()) - 1  # the end of a line that is another stretch's
    while stretch.stop is None or place < stretch.stop:
        line = file.readline()
        if not line:
            return
        place += len(line)
        yield line


def _open(path: Path) -> Any:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _read_lines(path: Path, text_key: str, stretch: Stretch) -> Iterator[str | ValueError]:
    with _open(path) as file:
        for number, line in enumerate(_lines_of(file, stretch), start=stretch.lines + 1):
            if not line.strip():
                continue
            yield _text_of_line(line, f"line {number} of {path}", text_key)


def _text_of_line(line: bytes, where: str, text_key: str) -> str | ValueError:
    try:
        row: Any = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        return ValueError(f"{where} is not valid JSON: {error}; mend or remove it, or {_SKIP}")
    if not isinstance(row, dict):
        return ValueError(
            f'{where} must hold an object, such as {{"{text_key}": "..."}}; mend or remove it, or '
            f"{_SKIP}"
        )
    known = cast("dict[str, Any]", row)
    if text_key not in known:
        return _no_such_key(where, text_key, list(known), f", or {_SKIP}")
    return _text(known[text_key], where, text_key)


def _of_batches(
    path: Path, text_key: str, batches: Iterator[Any], number: int
) -> Iterator[str | ValueError]:
    """Yield one column of batches of rows, before which there are `number` rows."""
    for batch in batches:
        if text_key not in batch.schema.names:
            raise _no_such_key(str(path), text_key, batch.schema.names)
        for value in batch.column(text_key).to_pylist():
            number += 1
            yield _text(value, f"row {number} of {path}", text_key)


def _parquet_batches(path: Path, stretch: Stretch) -> Iterator[Any]:
    parquet = _import_pyarrow("parquet", path)
    with parquet.ParquetFile(path) as file:
        stop = file.metadata.num_row_groups if stretch.stop is None else stretch.stop
        groups = list(range(stretch.start, stop))
        yield from file.iter_batches(batch_size=_ROWS_AT_A_TIME, row_groups=groups)


def _arrow_batches(path: Path, stretch: Stretch) -> Iterator[Any]:
    """Yield a stream's batches out of mapped memory: those before the stretch are not read."""
    ipc, pyarrow = _import_pyarrow("ipc", path), _import_pyarrow("lib", path)
    with pyarrow.memory_map(str(path)) as file:
        yield from islice(ipc.open_stream(file), stretch.start, stretch.stop)


def _import_pyarrow(module: str, path: Path) -> Any:
    from importlib import import_module

    try:
        return import_module(f"pyarrow.{module}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{path} needs pyarrow to be read: pip install "dsx-train[data]"', name=error.name
        ) from error


def _text(value: Any, where: str, text_key: str) -> str | ValueError:
    if value is None:
        return ""
    if not isinstance(value, str):
        return ValueError(
            f"{where}: {text_key!r} holds {type(value).__name__}, and a text is read; give "
            f"--text-key the column with the text, or {_SKIP}"
        )
    return value


def _no_such_key(where: str, text_key: str, known: list[str], more: str = "") -> ValueError:
    return ValueError(
        f"{where} has no {text_key!r}, but {', '.join(map(repr, known)) or 'nothing'}; give "
        f"--text-key the one with the text{more}"
    )
