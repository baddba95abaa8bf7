"""Tables of Eager Updates (arXiv:2502.12996)."""

from __future__ import annotations

from dsx.bench.paper.table import Table

TABLES: tuple[Table, ...] = ()
