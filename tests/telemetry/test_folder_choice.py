"""Whose folder it is: a resumed run goes on in its own, another gets the next free name."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dsx.telemetry.folder_choice import FolderChoice, Origin, look
from dsx.telemetry.metrics import metrics_path
from dsx.telemetry.run_file import RunFile


def choose(bases: Sequence[Path], session: str, origin: Origin | None = None) -> list[FolderChoice]:
    """Let clusters look and choose as handles do: as a new run, then from a checkpoint if any."""
    found = [look(base, m) for m, base in enumerate(bases)]
    found = json.loads(json.dumps(found))
    choices = [FolderChoice(base, m, session, found) for m, base in enumerate(bases)]
    for choice in choices:
        choice.begin(None)
        if origin is not None:
            choice.begin(origin)
    return choices


def start(
    bases: Sequence[Path], session: str, origin: Origin | None = None, **facts: Any
) -> tuple[list[Path], list[str]]:
    """Take a first step in every cluster; return the folders, and what was told."""
    folders, told = [], []
    for m, choice in enumerate(choose(bases, session, origin)):
        own = {"session": session, "host": socket.gethostname(), "pid": os.getpid()} | facts
        run = RunFile(True, m, {}, own)
        run.begin(choice.folder, 0, origin, choice.continues)
        told.append(choice.claim(origin, writes=True))
        run.confirm()
        run.close()
        assert choice.folder is not None
        folders.append(choice.folder)
    return folders, told


def test_the_same_command_again_gets_the_next_free_name(tmp_path: Path) -> None:
    bases = [tmp_path / "run"] * 2
    assert start(bases, "a") == (bases, ["", ""])
    second = [tmp_path / "run-2"] * 2
    folders, told = start(bases, "b")
    assert folders == second
    first, other = told
    assert first.startswith(f"{tmp_path / 'run'} holds another run (begun 20")
    assert first.endswith(f"running as process {os.getpid()}): this one's folder is {second[0]}")
    assert not other, "one cluster says it for all that share the folder"
    assert start(bases, "c")[0] == [tmp_path / "run-3"] * 2


def test_a_checkpoint_s_run_goes_on_in_its_folder_whatever_came_after(tmp_path: Path) -> None:
    bases = [tmp_path / "run"] * 2
    for session in ("a", "b", "c"):
        start(bases, session)
    assert start(bases, "d", Origin(tmp_path / "x", "b")) == ([tmp_path / "run-2"] * 2, ["", ""])
    assert start(bases, "e", Origin(tmp_path / "x", "d"))[0] == [tmp_path / "run-2"] * 2
    bases.append(bases[0])  # a cluster that is new
    assert start(bases, "f", Origin(tmp_path / "x", "a"))[0] == [tmp_path / "run"] * 3
    folders, told = start(bases, "g", Origin(tmp_path / "x", "elsewhere"))
    assert folders == [tmp_path / "run-4"] * 3
    assert f" than {tmp_path / 'x'}: this one's folder is " in told[0]


def test_clusters_that_share_nothing_agree(tmp_path: Path) -> None:
    bases = [tmp_path / site / "run" for site in "xy"]
    start(bases[:1], "a")  # at the first site only
    folders, told = start(bases, "b")
    assert folders == [tmp_path / site / "run-2" for site in "xy"]
    assert "(begun 20" in told[0] and "holds another run in another cluster: this" in told[1]


def test_files_of_another_run_at_one_site_are_kept(tmp_path: Path) -> None:
    bases = [tmp_path / site / "run" for site in "xy"]
    start([bases[0]], "a")
    start([tmp_path / "z" / "run", bases[1]], "b")
    before = (bases[1] / "run.cluster_1.json").read_text()
    folders, _ = start(bases, "c", Origin(tmp_path / "x", "a"))
    assert folders == [tmp_path / site / "run-2" for site in "xy"]
    assert (bases[1] / "run.cluster_1.json").read_text() == before


def test_a_run_of_before_run_json_goes_on(tmp_path: Path) -> None:
    metrics_path(tmp_path, 0).write_text('{"kind": "step", "step": 1}\n')
    assert start([tmp_path], "b", Origin(tmp_path / "x", "a")) == ([tmp_path], [""])


def test_what_is_no_run_is_free(tmp_path: Path) -> None:
    for name in ("run/checkpoints", "run-1", "run-x", "runs"):
        (tmp_path / name).mkdir(parents=True)
        metrics_path(tmp_path / name, 0).touch()
    (tmp_path / "run" / "log.txt").write_text("mine\n")
    assert look(tmp_path / "run", 0) == {}
    assert start([tmp_path / "run"], "a")[0] == [tmp_path / "run"]
    assert (tmp_path / "run" / "log.txt").read_text().startswith("mine\n")
    assert look(tmp_path / "nowhere" / "run", 0) == {}


def test_a_run_that_goes_back_stays_in_its_folder(tmp_path: Path) -> None:
    (choice,) = choose([tmp_path / "run"], "a")
    choice.claim(None, writes=True)
    for session in ("a", "of another run"):
        choice.begin(Origin(tmp_path / "x", session))
        assert choice.continues and choice.folder == tmp_path / "run"


def join(base: Path, cluster: int, session: str, told: Sequence[Any]) -> FolderChoice:
    """Choose as a cluster that joins a run does; `told` is what all found before that began."""
    found = [*told]
    found[cluster] = json.loads(json.dumps(look(base, cluster, session)))
    choice = FolderChoice(base, cluster, session, found, joins=True)
    choice.begin(None)
    return choice


def test_a_cluster_that_joins_goes_on_in_the_folder_of_the_run(tmp_path: Path) -> None:
    """Whether it had begun with the others, on this machine or another, or had written nothing."""
    base = tmp_path / "run"
    for session, expected in (("a", base), ("b", tmp_path / "run-2")):
        told = [look(base, m) for m in range(2)]
        start([base] * 2, session)
        choice = join(base, 1, session, told)
        assert choice.folder == expected and choice.continues
        assert choice.claim(None, writes=True) == ""
        for path in expected.glob("*cluster_1*"):
            path.unlink()
        for m in (0, 1):  # the first one's files say which run it is, too
            assert join(base, m, session, told).folder == expected
        elsewhere = join(tmp_path / "y" / "run", 1, session, told)
        assert elsewhere.folder == tmp_path / "y" / expected.name and not elsewhere.continues


def test_of_two_that_choose_the_same_folder_one_is_refused(tmp_path: Path) -> None:
    (first,) = choose([tmp_path / "run"], "a")
    (second,) = choose([tmp_path / "run"], "b")
    first.claim(None, writes=True)
    with pytest.raises(RuntimeError, match="run was free when this run was attached, and another"):
        second.claim(None, writes=True)


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({"pid": os.getpid()}, f"; running as process {os.getpid()})"),
        ({"pid": 2**22 + 1}, "; killed)"),  # above any process's number
        ({"host": "elsewhere"}, "; no end recorded: killed, or running on elsewhere)"),
    ],
    ids=["running", "killed", "elsewhere"],  # not by the process's number, which differs
)
def test_the_state_of_a_run_that_said_no_end(
    tmp_path: Path, facts: dict[str, Any], state: str
) -> None:
    start([tmp_path / "run"], "a", **facts)
    assert state in start([tmp_path / "run"], "b")[1][0]


@pytest.mark.parametrize("below", ["", "below"])
def test_a_folder_that_cannot_be_written_to_is_named(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / below
    with pytest.raises(RuntimeError, match=f"metrics.dir: {folder} cannot be .* by cluster 0, or"):
        start([folder], "a")


def test_without_a_folder_there_is_nothing_to_choose() -> None:
    choice = FolderChoice(None, 0, "a", [{}, {"1": ["b"]}])
    choice.begin(None)
    assert choice.folder is None and choice.claim(None, writes=True) == ""
