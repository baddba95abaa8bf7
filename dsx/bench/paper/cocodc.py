"""Tables of CoCoDC (arXiv:2504.17672)."""

from __future__ import annotations

from dsx.bench.paper.table import Table

TABLES: tuple[Table, ...] = ()
