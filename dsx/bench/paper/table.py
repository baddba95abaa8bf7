"""What a paper's table is: rows under the paper's labels, columns, claims, a measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Minutes = tuple[float, float]  # of two cores with nothing else to do: full, short
Samples = dict[str, dict[str, list[float]]]  # label, figure: a value per seed, or block


@dataclass(frozen=True)
class Row:
    """A line of a table.

    `preset` is one of dsx or "data_parallel", with "+codec" as in `dsx bench convergence`;
    `overrides` are axes of a "dsx" block, `study` what differs of the measurement's `Study`.
    `published` has the paper's figures by column.
    """

    label: str
    preset: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)
    study: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """A figure of the measurement, as it is shown: `format` is of str.format, as "{:.2f}"."""

    figure: str
    heading: str
    format: str = "{:.3f}"


@dataclass(frozen=True)
class Claim:
    """The paper's order of labels by a figure, the best first; no order within a nested tuple.

    With `is_equal` the claim is that the labels of the only place, a nested tuple, are equal: each
    two differ by at most `tolerance` of their values. ValueError for an order of a single place.
    """

    figure: str
    order: tuple[str | tuple[str, ...], ...]
    lower_is_better: bool = True
    is_equal: bool = False
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        if (len(self.order) == 1) != self.is_equal:
            raise ValueError(f"a claim of {self.order}: an order has places, equality has one")

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The order, each place a tuple of labels."""
        return tuple((place,) if isinstance(place, str) else place for place in self.order)

    def __str__(self) -> str:
        """Return the order with < or > between places, as the figures have it, or an equality."""
        if self.is_equal:
            return " = ".join(self.groups[0])
        sign = " < " if self.lower_is_better else " > "
        return sign.join(g[0] if len(g) == 1 else f"({', '.join(g)})" for g in self.groups)


@dataclass(frozen=True)
class Run:
    """What is asked of one run of the command."""

    data: Path
    short: bool
    jobs: int
    kept: Path


class Measure(Protocol):
    """How a table's rows get their figures."""

    @property
    def kind(self) -> str:
        """A word for lists: loss, simulation, line."""
        ...

    @property
    def full_and_short_minutes(self) -> Minutes:
        """What a list says; under 30 and under 5."""
        ...

    def minutes(self, rows: Sequence[Row], run: Run) -> float:
        """Return about how long `measure` takes."""
        ...

    def measure(self, rows: Sequence[Row], run: Run) -> Samples:
        """Return every row's samples; samples at one place of two rows are of one seed."""
        ...


@dataclass(frozen=True)
class Table:
    """A published table or figure, and how it is measured here.

    `name` is what the command calls it, `where` says where in which paper it stands, `note` what is
    different here.
    """

    name: str
    where: str
    title: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    claims: tuple[Claim, ...]
    measure: Measure
    note: str = ""

    def __post_init__(self) -> None:
        labels = [row.label for row in self.rows]
        if len({*labels}) < len(labels):
            raise ValueError(f"{self.name}: two rows have one label")
        figures = {column.figure for column in self.columns}
        for claim in self.claims:
            unknown = {label for group in claim.groups for label in group} - {*labels}
            if unknown or claim.figure not in figures:
                raise ValueError(
                    f"{self.name}: a claim is of labels {sorted(unknown)} or of a figure "
                    f"{claim.figure!r} that the table lacks"
                )
        for row in self.rows:
            if not {*row.published} <= figures:
                raise ValueError(f"{self.name}: {row.label} has a published figure of no column")
