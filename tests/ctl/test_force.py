"""`dsx ctl force-view`: of whom it is asked, what it says, and what it takes to be done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dsx.cli import app
from tests.ctl.runs import Run, three_clusters


def ctl(*words: object, typed: str = "") -> Result:
    return CliRunner().invoke(app, ["ctl", "force-view", *map(str, words)], input=typed)


def stand(run: Run, waiting: dict[int, list[int]], refuses: str = "") -> list[dict[str, Any]]:
    """Have clusters wait for others in view 3; return what they are told to force."""
    told: list[dict[str, Any]] = []
    for m, desk in enumerate(run.desks):
        facts: dict[str, Any] = {"view": 3, "members": [0, 1, 2]}
        if m in waiting:
            facts |= {"state": "waiting", "waiting": {"clusters": waiting[m], "seconds": 60.0}}
        desk.facts.append(lambda facts=facts: facts)

        def force(request: Any, facts: dict[str, Any] = facts) -> dict[str, Any]:
            if refuses:
                raise ValueError(refuses)
            told.append(dict(request))
            facts.update(view=4, members=[0, 1])
            return {"view": 3}

        desk.verbs["force_view"] = force
    return told


def test_a_typed_word_has_those_go_on_who_wait(tmp_path: Path) -> None:
    with three_clusters(tmp_path) as run:
        told = stand(run, {0: [2], 1: [2]})
        run.links[2].close()
        no = ctl(run.configs[0], "--without", 2, typed="yes\n")
        assert no.exit_code == 1 and "nothing is done" in no.stderr and not told
        assert "TWO RUNS" in no.stdout and "go on without rome (cluster 2)" in no.stdout
        done = ctl(run.configs[1], "--without", 2, typed="without 2\n")
        assert done.exit_code == 0, done.output
        assert "berlin (cluster 0), oslo (cluster 1) go(es) on, in view 4" in done.stdout
    assert [(one["by"], one["without"], one["view"]) for one in told] == [("oslo", [2], 3)] * 2
    assert told[0]["branch"] == told[1]["branch"] > 0


def test_for_scripts_it_asks_nothing_and_names_who_stays(tmp_path: Path) -> None:
    with three_clusters(tmp_path) as run:
        told = stand(run, {0: [2], 1: [2]})
        done = ctl(run.configs[0], "--with", 0, "--with", 1, "--yes")
        assert done.exit_code == 0, done.output
    assert told[0]["without"] == [2]


@pytest.mark.parametrize(
    ("waiting", "words", "why"),
    [
        ({}, ["--without", 2], "no cluster that answers waits"),
        ({0: [2]}, ["--without", 2], "oslo (cluster 1) does not wait (its state is training)"),
        ({0: [2], 1: [2]}, ["--without", 7], "clusters [7] are not in view 3"),
        ({0: [2], 1: [2]}, [], "say --without N or --with N"),
        ({0: [2], 1: [2]}, ["--without", 2, "--with", 0], "and not both"),
    ],
)
def test_what_is_not_to_be_forced_is_refused(
    tmp_path: Path, waiting: dict[int, list[int]], words: list[Any], why: str
) -> None:
    with three_clusters(tmp_path) as run:
        told = stand(run, waiting)
        done = ctl(run.configs[0], *words, "--yes")
        assert done.exit_code == 2 and why in done.stderr and not told


def test_a_cluster_that_refuses_is_named(tmp_path: Path) -> None:
    with three_clusters(tmp_path) as run:
        stand(run, {0: [2], 1: [2]}, refuses="cluster(s) 2 are reached from cluster 1")
        done = ctl(run.configs[0], "--without", 2, "--yes")
        assert done.exit_code == 2
        assert "oslo (cluster 1): cluster(s) 2 are reached from cluster 1" in done.stderr
