"""What a release saved is gone on with by this tree, as that release went on with it.

The releases are those of tests/fixtures; for 0.1.0 stands its commit, 2317291.

Compared are the weights of both clusters at step 24, of every preset in plain PyTorch and of a
DeepSpeed engine, saved at step 13 or 14 with transfers under way (`fixtures.py` says how):

- gone on from the old files, against gone on from what this tree saves after loading them: equal in
  every bit, on any machine;
- against what the release came to, and against this tree's own run that was never stopped: equal in
  every bit where torch and the processor are those the files were made with. Elsewhere a matrix
  product rounds otherwise: to 1e-6 of the largest weight, and dilocox, whose int4 codes may fall to
  the other side, to 2e-2.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from tests.distributed import run_distributed

from .models import PRESETS
from .old_checkpoint import DEEPSPEED, NUM_CLUSTERS, go_on_all, machine

FIXTURES = Path(__file__).parents[1] / "fixtures"
RELEASES = sorted(p.name.removeprefix("checkpoint_") for p in FIXTURES.glob("checkpoint_*"))
FORMATS = {"2317291": 6, "0.2.0": 7}  # of the outer state, which a release never changes
TOLERANCE = {"dilocox": 2e-2}
Ends = list[dict[str, dict[str, Any]]]  # by cluster, row and way


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def ends(release: str, tmp_path_factory: pytest.TempPathFactory) -> Ends:
    again = str(tmp_path_factory.mktemp("again"))
    engines = [DEEPSPEED] if importlib.util.find_spec("deepspeed") else []
    names = [*PRESETS, *engines]
    return run_distributed(
        go_on_all,
        NUM_CLUSTERS,
        str(FIXTURES / f"checkpoint_{release}"),
        names,
        again,
        timeout_seconds=280,
    )


@pytest.mark.ci
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_goes_on(name: str, release: str, ends: Ends) -> None:
    check(name, release, ends)


@pytest.mark.ci
def test_a_deepspeed_engine_goes_on(release: str, ends: Ends) -> None:
    pytest.importorskip("deepspeed")
    check(DEEPSPEED, release, ends)


def check(name: str, release: str, ends: Ends) -> None:
    fixtures = FIXTURES / f"checkpoint_{release}"
    made_with = json.loads((fixtures / "made.json").read_text())["machine"]
    for cluster, rows in enumerate(ends):
        found = rows[name]
        gone_on = found["fixture"]
        require_same(gone_on, found["saved again"])
        before = load_file(fixtures / name / f"end_of_cluster_{cluster}.safetensors")
        for expected in (before, found["whole"]):
            if machine() == made_with:
                require_same(gone_on, expected)
            else:
                require_near(gone_on, expected, TOLERANCE.get(name, 1e-6))


def require_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    assert [n for n in ours if ours[n].tobytes() != theirs[n].tobytes()] == []


def require_near(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    largest = max(np.abs(weight).max() for weight in theirs.values())
    worst = max(np.abs(ours[name] - theirs[name]).max() for name in theirs)
    assert worst <= tolerance * largest


@pytest.mark.parametrize("name", RELEASES)
def test_files_are_those_that_were_made(name: str) -> None:
    """A fixture made anew by a later tree would prove nothing."""
    import torch

    from .evidence import digest

    fixtures = FIXTURES / f"checkpoint_{name}"
    made = json.loads((fixtures / "made.json").read_text())
    assert made["commit"] == name
    assert len(made["ends"]) == NUM_CLUSTERS * (len(PRESETS) + 1)
    for path, expected in made["ends"].items():
        weights = load_file(fixtures / path)
        assert digest({n: torch.from_numpy(w) for n, w in weights.items()}) == expected
    saved = next((fixtures / "diloco").glob("cluster_0/dsx_rank_*.safetensors"))
    with safe_open(str(saved), framework="np") as file:
        found = json.loads(file.metadata()["dsx"])["format"]
    assert found == FORMATS[name]
