"""Tables of CO2 (arXiv:2401.16265)."""

from __future__ import annotations

from dsx.bench.paper.table import Table

TABLES: tuple[Table, ...] = ()
