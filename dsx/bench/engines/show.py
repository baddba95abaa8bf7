"""The table of `dsx bench engines`, in Markdown."""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Sequence

from dsx.bench.engines.bench import METHODS, Row

_PACKAGES = ("torch", "deepspeed", "megatron-core")
_COLUMNS = (
    "engine", "inside a cluster", "ranks", "plain", "one cluster", "the same bits",
    *(f"two, `{way}`" for way in METHODS), "averages equal", "seconds",
)  # fmt: skip


def as_markdown(rows: Sequence[Row], steps: int) -> str:
    """Return the table, with versions above it; below it, what is wrong."""
    lines = [
        f"{steps} steps of each cluster; loss of a held-out token in nats. {_versions()}.", "",
        f"| {' | '.join(_COLUMNS)} |", "|" + " --- |" * len(_COLUMNS),
    ]  # fmt: skip
    for row in rows:
        averages = [_loss(row.averages.get(way, math.nan)) for way in METHODS]
        cells = [
            row.engine, row.layout, str(row.ranks), _loss(row.plain), _loss(row.one),
            _word(row.is_same), *averages, _word(row.are_equal), f"{row.seconds:.0f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    wrong = [row for row in rows if row.wrong]
    lines += ["", f"{len(rows) - len(wrong)} of {len(rows)} as they should be."]
    lines += [f"{row.name}: {why}" for row in wrong for why in row.wrong]
    return "\n".join(lines) + "\n"


def _loss(loss: float) -> str:
    return "-" if math.isnan(loss) else f"{loss:.4f}"


def _word(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _versions() -> str:
    found: list[str] = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join([*found, f"Python {platform.python_version()}"])
