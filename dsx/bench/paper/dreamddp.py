"""Tables of DreamDDP (arXiv:2502.11058)."""

from __future__ import annotations

from dsx.bench.paper.table import Table

TABLES: tuple[Table, ...] = ()
