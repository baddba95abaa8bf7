"""How many bytes an outer state has per element, as docs/checkpoints.md says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import tests.compress.test_over_gloo as codecs
from dsx.checkpoint.files import SavedRank, rank_file
from tests.checkpoint.test_reshard import new_tiny, save_all
from tests.compress.test_over_gloo import loss, simulated
from tests.tiny import mean_loss


def bytes_by_kind(path: Path) -> Counter[str]:
    """Return the bytes of one file: anchor, momentum, the codec's, and what is under way."""
    saved, found = SavedRank(path), Counter[str]()
    for name in saved._names:
        kind = name.rpartition("/")[0]
        of = next((k for k in ("before.codec", "codec", "guard") if kind.startswith(k)), kind)
        found[of] += saved.read(name).nbytes
    return found


def test_of_a_plain_method_anchor_and_momentum(tmp_path: Path) -> None:
    run = new_tiny("diloco")
    for _ in range(5):
        run.train_step(mean_loss)
    save_all(run, tmp_path)
    numel = sum(fragment.numel for fragment in run.loops[0].adapter.fragments)
    found = bytes_by_kind(rank_file(tmp_path / "0", 0))
    assert found["anchor"] == found["outer.momentum"] == 4 * numel
    assert found.total() - found["guard"] - 8 * numel <= 64


@pytest.mark.parametrize(("storage", "each"), [("fp32", 4), ("bf16", 2), ("int8", 1)])
def test_of_factors_a_transfer_under_way_has_all_that_it_is_made_again_from(
    storage: str, each: int, tmp_path: Path, monkeypatch: Any
) -> None:
    own = codecs.CODECS["low_rank"] | {"error_feedback": storage}
    monkeypatch.setitem(codecs.CODECS_OF_ALL, "own", own)
    run = simulated("dilocox", "own", 2)
    for _ in range(8):
        run.train_step(loss)
    save_all(run, tmp_path)
    loop = run.loops[0]
    fragments = loop.adapter.fragments
    found = bytes_by_kind(rank_file(tmp_path / "0", 0))
    numel = sum(fragment.numel for fragment in fragments)
    carried = sum(f.numel for f in fragments if any(t.fragment == f.id for t in loop.in_flight))
    assert found["anchor"] == found["outer.momentum"] == 4 * numel
    assert found["in_flight.mean"] == found["in_flight.sent"] == 4 * carried == 4 * numel
    residuals = [
        e.residual for f in fragments for e in loop.state.channels[f.id].codec.errors.values()
    ]
    stored = sum(r.stored.nbytes for r in residuals)
    assert stored == pytest.approx(each * sum(r.numel for r in residuals), rel=0.02)
    assert found["before.codec"] == found["codec"] - stored  # what a mean alone does not give
