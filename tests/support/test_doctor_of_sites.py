"""`dsx doctor` of several sites: their data, host memory against the plan, variables of a site."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsx.cli import app
from dsx.data import build
from dsx.support.doctor import machine, planned, screen
from tests.support.test_doctor import doctor, marked, model_of, write


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Datasets `a`, `near` with most of its documents, `other` with none, and a copied manifest."""
    root = tmp_path_factory.mktemp("datasets")
    for name in ("a", "near", "other"):
        folder = root / f"{name} sources"
        folder.mkdir()
        for number in range(20):
            text = f"document {number}"
            changed = (name == "near" and number < 3) or name == "other"
            (folder / f"{number}.txt").write_text(f"{text} of {name}" if changed else text)
        build([folder], root / name)
    (root / "copy").mkdir()
    shutil.copy(root / "a" / "dataset.json", root / "copy" / "dataset.json")
    found = {name: root / name for name in ("a", "near", "other")}
    return {**found, "copy": root / "copy" / "dataset.json"}


@pytest.mark.parametrize(
    ("names", "wanted", "mark", "words"),
    [
        (["a"], "auto", "ok", "is of all clusters: "),
        (["a"], "own", "STOP", "all would read the same; leave that out"),
        (["a", "copy"], "split", "ok", "each of 2 reads a part of its own"),
        (["a", "near"], "auto", "STOP", "about 85 % of their documents in common: another build"),
        (["a", "near"], "split", "STOP", "for which they have to be the same; copy one"),
        (["a", "near"], "own", "note", "about 85 % of their documents in common, which both read"),
        (["a", "other"], "auto", "ok", "no documents in common"),
        (["a", "other"], "split", "STOP", "about 0 % of their documents in common"),
    ],
)
def test_what_clusters_have_in_common(
    names: list[str], wanted: str, mark: str, words: str, datasets: dict[str, Path], tmp_path: Path
) -> None:
    config = write(tmp_path, clusters={"num_clusters": 2, "data": wanted})
    done = doctor(config, *(word for name in names for word in ("--data", datasets[name])))
    ((found, text),) = marked(done, "data")
    assert (found, done.exit_code) == (mark, mark == "STOP") and words in text


def test_datasets_of_several_tokenizers(datasets: dict[str, Path], tmp_path: Path) -> None:
    fields = json.loads((datasets["other"] / "dataset.json").read_text())
    (tmp_path / "dataset.json").write_text(json.dumps({**fields, "tokenizer": "gpt2 0123"}))
    config = write(tmp_path, clusters={"num_clusters": 2, "data": "own"})
    done = doctor(config, "--data", datasets["a"], "--data", tmp_path)
    ((mark, text),) = marked(done, "data")
    assert mark == "STOP" and "several tokenizers, byte, gpt2 0123" in text


def test_data_for_another_number_of_clusters(datasets: dict[str, Path], tmp_path: Path) -> None:
    done = doctor(write(tmp_path, clusters={"num_clusters": 3}), *["--data", datasets["a"]] * 2)
    assert done.exit_code == 2 and "--data is given 2 times, for 3 clusters" in done.stderr
    done = doctor("--data", datasets["a"])
    assert done.exit_code == 2 and "--data goes with CONFIG" in done.stderr


def test_host_memory_is_compared_with_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, model = write(tmp_path, state={"device": "host"}), model_of(tmp_path)
    memory = CliRunner().invoke(app, ["memory", *map(str, (config, *model)), "--json"])
    (rank,) = json.loads(memory.stdout)["ranks"]
    needed = 4 * rank["outer_on_host"]  # two clusters of two ranks
    for host, mark, words in (
        ((needed, needed), "ok", "4 ranks on this host will hold"),
        ((needed - 1, needed), "note", "end what else holds memory"),
        ((needed - 2, needed - 1), "STOP", 'leave "state": {"device": "host"} out'),
        (None, "note", "the system does not tell"),
    ):
        monkeypatch.setattr(screen, "free_host_bytes", lambda host=host: host)
        done = doctor(config, *model, "--limit", 1)
        ((found, text),) = marked(done, "host")
        assert (found, done.exit_code) == (mark, mark == "STOP") and words in text


def test_room_on_disk_is_compared_with_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"device": "disk", "dir": str(tmp_path)}
    config, model = write(tmp_path, state=state), model_of(tmp_path)
    memory = CliRunner().invoke(app, ["memory", *map(str, (config, *model)), "--json"])
    (rank,) = json.loads(memory.stdout)["ranks"]
    needed = 4 * rank["outer_on_disk"]  # two clusters of two ranks
    assert rank["outer_on_disk"] > 0 and rank["outer_on_device"] == 0
    usage = shutil.disk_usage(tmp_path)
    for free, mark, words in (
        (needed, "ok", "4 ranks on this host will keep"),
        (needed - 1, "STOP", "make room, or name another folder"),
    ):
        seen = usage._replace(free=free)
        monkeypatch.setattr(planned.shutil, "disk_usage", lambda path, seen=seen: seen)
        ((found, text),) = marked(doctor(config, *model, "--limit", 1), "state")
        assert found == mark and words in text
    state["dir"] = str(tmp_path / "nowhere")
    ((found, text),) = marked(doctor(write(tmp_path, state=state), *model), "state")
    assert found == "STOP" and "is no folder on this host" in text


def test_free_memory_is_that_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path / "none")
    told = machine.free_host_bytes()
    if told is None:
        pytest.skip("the system does not tell its memory")
    assert 0 < told[0] <= told[1]
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert machine.free_host_bytes() == (3000, 5000)
    (tmp_path / "memory.max").write_text("max\n")
    unlimited = machine.free_host_bytes()
    assert unlimited is not None and unlimited[1] == told[1]


def test_variables_of_a_site_are_laid_over_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(tmp_path)
    monkeypatch.setenv("DSX_RENDEZVOUS", "tcp://no.such.host.invalid:29400")
    monkeypatch.setenv("DSX_CLUSTER_ID", "1")
    done = doctor(config)
    assert marked(done, "rendezvous")[0][0] == "STOP"
    assert "DSX_RENDEZVOUS, DSX_CLUSTER_ID of the environment come" in marked(done, "block")[0][1]
    monkeypatch.setenv("DSX_CLUSTER_IT", "1")
    done = doctor(config)
    assert done.exit_code == 1
    assert "did you mean DSX_CLUSTER_ID?" in marked(done, "block")[0][1]


def test_an_interface_of_another_host_is_given_at_its_launch(tmp_path: Path) -> None:
    done = doctor(write(tmp_path, clusters={"num_clusters": 2, "interface": "eth77"}))
    ((_, text),) = marked(done, "interface")
    assert "by --dsx-interface or DSX_INTERFACE where it is launched on this host" in text
