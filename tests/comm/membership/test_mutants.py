"""The simulator's power: every mistake of `mutants.py` is caught by a scenario or a seed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.comm.membership.mutants import MUTANTS, ROOT, Patched
from tests.levels import by_default

QUICK = ("half of a view is a quorum", "commits without comparing digests", "a founder asks nobody")


@pytest.mark.parametrize("what", by_default([mutant.what for mutant in MUTANTS], *QUICK))
def test_a_mistake_is_caught(what: str) -> None:
    run = [sys.executable, "-m", "tests.comm.membership.mutants", what]
    out = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert out.returncode == 0, out.stderr[-2000:]
    assert out.stdout.strip(), f"nothing notices: {what}"


def test_mistakes_fit_the_source_and_have_names_of_their_own() -> None:
    assert len({mutant.what for mutant in MUTANTS}) == len(MUTANTS) >= 29
    for mutant in MUTANTS:
        assert mutant.old in Patched(mutant).source


@pytest.mark.ci
def test_without_a_mistake_nothing_is_caught() -> None:
    code = (
        "from tests.comm.membership.mutants import hunt, Mutant\n"
        "from tests.comm.membership import mutants\n"
        "mutants.SEEDS_PER_SCENARIO, mutants.SEEDS = 1, 1\n"
        "print('caught:', hunt(Mutant('none', 'dsx.comm.membership.quorum',"
        " 'return len(contributors)', 'return  len(contributors)')))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert out.stdout.strip() == "caught:", out.stdout + out.stderr
