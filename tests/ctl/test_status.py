"""`dsx ctl status`: asked of one cluster, by a member alone, answered by all."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dsx.cli import app
from dsx.comm.links.key_changes import make_key
from dsx.comm.links.peer import FIRST_VISITOR
from dsx.ctl.visit import NobodyAnswers, Visit
from tests.ctl.runs import NAMES, make_settings, three_clusters, write_config


def ctl(*words: object) -> Result:
    return CliRunner().invoke(app, ["ctl", *map(str, words)], env={"COLUMNS": "200"})


def test_one_cluster_is_asked_and_all_answer(tmp_path: Path) -> None:
    with three_clusters(tmp_path) as run:
        for own in (0, 2):  # rome has no address itself
            done = ctl("status", run.configs[own], "--json")
            assert done.exit_code == 0, done.output
            told = json.loads(done.stdout)
            assert [told["clusters"][str(m)]["step"] for m in range(3)] == [10, 11, 12]
            assert [told["clusters"][str(m)]["name"] for m in range(3)] == list(NAMES)
            assert told["asked"] in (0, 1)
        printed = ctl("status", run.configs[1], "--cluster-id", 1)
        assert printed.exit_code == 0 and "2 rome" in printed.stdout and "12" in printed.stdout


def test_who_is_gone_is_told_and_visitors_are_forgotten(tmp_path: Path) -> None:
    with three_clusters(tmp_path) as run:
        run.links[2].close()
        until = time.monotonic() + 10
        while not run.links[0].why_gone((2, 0)):
            assert time.monotonic() < until
            time.sleep(0.05)
        visit = Visit(run.settings[1], 1, 10)
        told = visit.ask("status")
        assert "did not come back" in told[2]["error"] and told[2]["is_gone"]
        assert [told[m]["state"] for m in range(2)] == ["training"] * 2
        (error,) = visit.ask("dance", to=1).values()
        assert error == {"error": "'dance' is not served here now; these are: status"}
        with pytest.raises(ValueError, match="it is for cluster 7, of 3"):
            visit.ask("status", to=7)
        visit.close()
        while any(rank >= FIRST_VISITOR for _, rank in run.links[0]._switch.peers):
            assert time.monotonic() < until + 10
            time.sleep(0.05)
        assert {"training"} == {str(a["state"]) for a in Visit(run.settings[0], 0, 10).ask(
            "status", to=0).values()}  # fmt: skip


def test_a_desk_tells_who_asks_and_takes_nobodys_word_for_it(tmp_path: Path) -> None:
    with three_clusters(tmp_path) as run:
        asked: list[str] = []
        for desk in run.desks:
            desk.verbs["note"] = lambda request: asked.append(request["by"]) or {}
        visit = Visit(run.settings[2], 2, 10)
        visit.ask("note", by="berlin")
        visit.close()
        assert asked == ["rome"] * 3


def test_a_verb_that_fails_is_an_answer(tmp_path: Path) -> None:
    def refuse(request: object) -> dict[str, object]:
        raise ValueError("not now")

    with three_clusters(tmp_path) as run:
        run.desks[1].verbs["save"] = refuse
        visit = Visit(run.settings[0], 0, 10)
        assert visit.ask("save", to=1) == {1: {"error": "not now"}}
        visit.close()


def test_nobody_answers_says_who_was_tried_and_where(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    done = ctl("status", write_config(tmp_path / "a.json", settings[0]), "--seconds", 1)
    assert done.exit_code == 1
    for m, name in enumerate(NAMES[:2]):
        assert f"{name} (cluster {m}) at {settings[0].address_of(m)}" in done.stderr
    assert "is the run on?" in done.stderr


@pytest.mark.ci
def test_a_stranger_gets_no_answer(tmp_path: Path) -> None:
    with three_clusters(tmp_path / "run") as run:
        stranger = make_settings(tmp_path / "other")[0]  # knows oslo's key; nobody knows its own
        public = Path("members") / "oslo.public"
        theirs = (tmp_path / "run" / "berlin" / public).read_text()
        (Path(stranger.keys) / public).write_text(theirs)
        with pytest.raises(NobodyAnswers, match="oslo"):
            Visit(replace(run.settings[0], keys=stranger.keys), 0, 3)
        assert run.links[1].problems["a key of no member"]


def test_what_has_no_links_or_no_keys_is_refused_by_name(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    gloo = tmp_path / "gloo.json"
    gloo.write_text(json.dumps({"dsx": {"preset": "diloco", "clusters": {"num_clusters": 2}}}))
    done = ctl("status", gloo)
    assert done.exit_code == 2 and "meet over gloo, so the run has no links" in done.stderr
    keyless = write_config(tmp_path / "open.json", settings[0], security="none", transport="link")
    assert 'link.security "none"' in ctl("status", keyless).stderr
    silent = write_config(tmp_path / "relay.json", settings[0], members=NAMES,
                          relay="127.0.0.1:9")  # fmt: skip
    assert "meet at a relay, which dsx ctl does not go through" in ctl("status", silent).stderr
    make_key(Path(settings[0].keys).parent / "both", "berlin")
    make_key(Path(settings[0].keys).parent / "both", "oslo")
    both = write_config(tmp_path / "both.json", settings[0], keys=str(tmp_path / "both"))
    assert "holds the secret of berlin, oslo: say whose key" in ctl("status", both).stderr
    assert "cluster 5: say whose key" in ctl("status", both, "--cluster-id", 5).stderr
