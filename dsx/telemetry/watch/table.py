"""Rows of numbers in the order of a run, in bounded memory, and cut into as many as a chart has.

A table keeps `most` rows at most. When it is full, each two neighbours become one, and from then on
as many of those that come: all rows but the last stand for equally many records, and a run of a
hundred thousand rounds is as well resolved at its beginning as at its end. How two become one, a
column says:

    last     the later one, as a step, a time, or a running sum
    sum      both together, as seconds or bytes of one record
    mean     of all; not a number as soon as one of them is not: a chart has a gap there
    known    the mean of those that are known, as a figure that not every record has
    low      the least, and `high` the greatest, of those that are numbers
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

Merge = Literal["last", "sum", "mean", "known", "low", "high"]
_Array = Any  # of numpy, float64


class Table:
    """Columns by name, each with its way to merge; the first one only grows."""

    def __init__(self, columns: Mapping[str, Merge], most: int) -> None:
        assert most % 2 == 0
        self.columns = dict(columns)
        self._places = {name: index for index, name in enumerate(columns)}
        self._most = most
        self.records_per_row = 1
        self._rows: _Array = np.empty((min(256, most), len(columns)))
        self._count = 0
        self._open: list[Sequence[float]] = []  # records behind the last whole row
        self._is_known = np.zeros(len(columns), bool)

    def __len__(self) -> int:
        self._close_rows()
        return self._count + bool(self._open)

    def append(self, values: Sequence[float]) -> None:
        """Add a record's numbers, in the order of the columns; NaN is one that it lacks."""
        self._open.append(values)
        if len(self._open) >= 4096 and len(self._open) >= self.records_per_row:
            self._close_rows()

    def last(self) -> float | None:
        """Return the first column of the last record."""
        if self._open:
            return float(self._open[-1][0])
        return float(self._rows[self._count - 1, 0]) if self._count else None

    def is_known(self, name: str) -> bool:
        """Whether a column has had a number."""
        self._close_rows()
        place = self._places[name]
        return bool(self._is_known[place]) or any(not math.isnan(row[place]) for row in self._open)

    def cut(self, first: float) -> None:
        """Drop what the first column has from a value on: it comes again."""
        self._close_rows()
        kept = int(np.searchsorted(self._rows[: self._count, 0], first))
        if kept < self._count:
            self._count, self._open = kept, []
        else:
            self._open = [row for row in self._open if row[0] < first]

    def read(self) -> dict[str, _Array]:
        """Return the columns, each [rows]; what is open is the last row."""
        self._close_rows()
        rows = self._rows[: self._count]
        if self._open:
            rows = np.concatenate([rows, self._merged(np.asarray(self._open, float)[None])])
        return {name: rows[:, place] for name, place in self._places.items()}

    def _close_rows(self) -> None:
        """Make rows of what is open, as far as it goes."""
        while len(self._open) >= self.records_per_row:
            width = self.records_per_row
            room = self._most - self._count
            taken = min(len(self._open) // width, room)
            new = np.asarray(self._open[: taken * width], float).reshape(taken, width, -1)
            self._is_known |= ~np.isnan(new).all(axis=(0, 1))
            self._make_room(taken)
            self._rows[self._count : self._count + taken] = self._merged(new)
            self._count += taken
            self._open = self._open[taken * width :]
            if self._count == self._most:
                pairs = self._rows[: self._most].reshape(self._most // 2, 2, -1)
                self._count //= 2
                self._rows[: self._count] = self._merged(pairs)
                self.records_per_row *= 2

    def _make_room(self, rows: int) -> None:
        size = len(self._rows)
        if self._count + rows > size:
            size = min(max(2 * size, self._count + rows), self._most)
            self._rows = np.resize(self._rows, (size, self._rows.shape[1]))

    def _merged(self, groups: _Array) -> _Array:
        """Return [rows, columns] of [rows, records, columns]."""
        if groups.shape[1] == 1:
            return groups[:, 0]
        merged = np.empty((len(groups), groups.shape[2]))
        for name, place in self._places.items():
            merged[:, place] = _merge(self.columns[name], groups[:, :, place])
        return merged


def _merge(how: Merge, values: _Array) -> _Array:
    """Return [rows] of [rows, records]."""
    if how == "last":
        return values[:, -1]
    if how == "sum":
        return np.nansum(values, axis=1)
    if how == "mean":
        return values.mean(axis=1)
    if how == "low":
        return np.fmin.reduce(values, axis=1)
    if how == "high":
        return np.fmax.reduce(values, axis=1)
    return known_mean(np.nansum(values, axis=1), np.sum(~np.isnan(values), axis=1))


def known_mean(sums: _Array, counts: _Array) -> _Array:
    """Return sums by counts, NaN where nothing was counted."""
    return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)


def in_buckets(how: Merge, values: _Array, starts: _Array) -> _Array:
    """Return [buckets] of [rows]: bucket b has rows from starts[b] to starts[b + 1].

    An empty bucket is NaN. A mean counts each row once.
    """
    starts, ends = starts[:-1], starts[1:]
    filled = ends > starts
    found = np.full(len(starts), np.nan)
    if not filled.any():
        return found
    at, until = starts[filled], ends[filled]
    values = values[: until[-1]]  # reduceat takes the last stretch up to the end
    if how == "last":
        found[filled] = values[until - 1]
    elif how in ("low", "high"):
        found[filled] = (np.fmin if how == "low" else np.fmax).reduceat(values, at)
    elif how == "mean":
        found[filled] = np.add.reduceat(values, at) / (until - at)
    else:
        known = ~np.isnan(values)
        sums = np.add.reduceat(np.where(known, values, 0.0), at)
        counts = np.add.reduceat(known.astype(int), at)
        found[filled] = (
            np.where(counts > 0, sums, np.nan) if how == "sum" else known_mean(sums, counts)
        )
    return found
