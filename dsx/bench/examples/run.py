"""A row, from its sources to its results: what is missing, two runs, and what they have left."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

from dsx.bench.examples.launch import RowFailed, launch
from dsx.bench.examples.prepare import prepare
from dsx.bench.examples.reading import read
from dsx.bench.examples.show import Outcome
from dsx.bench.examples.table import Row, checksum

_TELL_SECONDS = 20.0


def run_row(
    row: Row, trees: Path, out: Path, deadline_seconds: float, tell: Callable[[str], None]
) -> Outcome:
    """Return what became of a row; its folder below `out` is made anew."""
    script = trees / row.tree.name / row.file
    if not script.is_file():
        return Outcome(row, "not run", f"no {script}: in {trees}, {row.tree.how}")
    missing = [name for name in row.packages if importlib.util.find_spec(name) is None]
    if missing:
        return Outcome(row, "not run", f"not installed: pip install {' '.join(missing)}")
    data, place = out / "data", out / row.name
    shutil.rmtree(place, ignore_errors=True)
    sha256 = checksum(script)
    try:
        prepare(row.prepared, data)
        runs = [
            launch(
                row, trees / row.tree.name, data, place / name, with_dsx, deadline_seconds,
                _every(tell, words),
            )
            for name, with_dsx, words in (
                ("clusters", True, "under dsx.run"), ("plain", False, "data parallel"),
            )
        ]  # fmt: skip
        figures = read(row, *runs)
    except (RowFailed, ValueError, OSError) as error:
        return Outcome(row, "failed", str(error), sha256)
    return Outcome(row, "ok", "", sha256, figures, runs[0].as_typed, runs[1].as_typed)


def _every(tell: Callable[[str], None], words: str) -> Callable[[float], None]:
    """Return what tells the seconds that have gone by, now and then."""
    said = -_TELL_SECONDS

    def now(seconds: float) -> None:
        nonlocal said
        if seconds - said >= _TELL_SECONDS:
            said = seconds
            tell(f"{words}, {seconds:.0f} s")

    return now
