"""The test suite's cases, and those with low rank on the net of theirs, which is small."""

from __future__ import annotations

from typing import Any

from tests.tiny import ALL_CASES, Case


def _with_low_rank(name: str, **compression: Any) -> Case:
    case, low_rank = ALL_CASES[name], {"type": "low_rank", "min_saving": 1.0, **compression}
    return case._replace(overrides={**case.overrides, "compression": low_rank})


CASES: dict[str, Case] = {
    **ALL_CASES,
    "diloco, low rank": _with_low_rank("diloco", rank=2),
    "dilocox, low rank": _with_low_rank("dilocox", dense_rounds=1),
}
