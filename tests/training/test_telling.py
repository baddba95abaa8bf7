"""What a run tells people: real clusters, a real server, and no address in what is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import dsx
from dsx.cli import app
from tests.distributed import free_port, run_distributed
from tests.levels import by_default
from tests.telemetry.notices.web import Web
from tests.tiny import TinyNet, batch

ROOT = Path(__file__).parents[2]


def config_of(notices: list[dict[str, Any]], folder: Path | None = None, **more: Any) -> Any:
    clusters = {"num_clusters": 2, "deadline_seconds": 30}
    metrics = {"notices": notices} | ({} if folder is None else {"dir": str(folder)})
    block = {"preset": "diloco", "clusters": clusters, "schedule": {"interval": 4}}
    return {"dsx": {**block, "metrics": metrics, **more}}


def attach(cluster: int, config: dict[str, Any]) -> tuple[Any, Any, Any]:
    model = TinyNet(cluster)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, dsx.attach(model, optimizer, config=config)


def train(config: dict[str, Any], bad_step: int = 0, last: int = 9) -> None:
    world = dsx.init_distributed(config)
    model, optimizer, handle = attach(world.cluster_id, config)
    for step in range(1, last + 1):
        optimizer.zero_grad()
        model(*batch(world.cluster_id, step)).backward()
        optimizer.step()
        if step == bad_step and world.cluster_id:
            with torch.no_grad():
                next(model.parameters()).fill_(torch.nan)
        handle.log_step(loss=float("nan") if step == bad_step and world.cluster_id else 1.0)
    handle.finish()
    handle.close()


def test_a_run_of_two_clusters_tells_once_and_writes_no_address(tmp_path: Path) -> None:
    with Web() as web:
        run_distributed(train, 2, config_of([{"url": web.url}], tmp_path / "first"), 3)
    told = [(d["kind"], d["cluster"], d["clusters"], d["text"]) for d in web.documents]
    assert {d["run"] for d in web.documents} == {"first"}
    ends = [one for one in told if one[0] == "finished"]
    assert ends == [("finished", 0, [0, 1], "dsx, first: finished at step 9")]
    diverging = [one for one in told if one[0] == "diverging"]
    assert diverging == [
        ("diverging", 1, [1], "dsx, first: the loss of cluster 1 is nan at step 4")
    ]
    left_out = [one for one in told if one[0] == "left_out"]
    assert [one[1:3] for one in left_out] == [(0, [1])] * 2
    assert left_out[1][3].endswith("(the same 2 times by now)") and len(told) == 4
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "run.json" for path in written)
    for path in written:
        assert "SECRET" not in path.read_text(), path
    run = json.loads((tmp_path / "first" / "run.json").read_text())
    given = run["starts"][0]["config"]["given"]["dsx"]["metrics"]["notices"]
    assert given == [{"url": "http://127.0.0.1/..."}]


def refused(config: dict[str, Any]) -> str:
    world = dsx.init_distributed(config)
    with pytest.raises(ValueError) as caught:
        attach(world.cluster_id, config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("notice", "words"),
    [({"url_env": "NO_SUCH_HOOK"}, "url_env='NO_SUCH_HOOK' is not in the environment"),
     ({"url_file": "/no/such/file"}, "url_file='/no/such/file' cannot be read: No such file"),
     ({"url_file": "/etc/hostname"}, "what it holds is no address that begins with https://")],
)  # fmt: skip
def test_a_place_that_cannot_be_told_ends_the_start_of_all(
    notice: dict[str, Any], words: str
) -> None:
    for said in run_distributed(refused, 2, config_of([notice])):
        assert said.startswith("cluster 0: dsx.metrics.notices[0].") and words in said


SCRIPT = """
import sys, torch, dsx
from tests.training.test_telling import attach, batch
import json
config = json.loads(sys.argv[1])
dsx.init_distributed(config)
model, optimizer, handle = attach(0, config)
for step in range(1, 4):
    optimizer.zero_grad()
    model(*batch(0, step)).backward()
    optimizer.step()
%s
"""


@pytest.mark.parametrize(
    ("end", "status", "text"),
    by_default(
    [("raise RuntimeError('no more data')", 1, "RuntimeError: no more data"),
     ("", 0, "the process ends without finish()"),
     ("handle.close()", 0, "closed without finish()"),
     ("try: raise KeyError('a')\nfinally: handle.close()", 1, "KeyError: 'a'")],
     "", of=lambda v: v[0]),
)  # fmt: skip
def test_an_end_that_nobody_tells_dsx_is_told(end: str, status: int, text: str) -> None:
    with Web() as web:
        config = config_of([{"url_env": "OUR_HOOK"}])
        config["dsx"]["clusters"] = {"num_clusters": 1}
        place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        place |= {"MASTER_PORT": str(free_port()), "OUR_HOOK": web.url}
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT % end, json.dumps(config)], cwd=ROOT,
            env={**os.environ, **place}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert run.returncode == status, run.stderr
        documents = web.documents
    (told,) = documents
    assert told["kind"] == "ended" and told["step"] == 3 and told["text"].endswith(f": {text}")


def test_a_trial_is_sent_by_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Web([200, 500]) as web:
        monkeypatch.setenv("OUR_HOOK", web.url)
        places = [{"url_env": "OUR_HOOK", "form": "slack"}, {"url_env": "OUR_HOOK"}]
        places.append({"command": ["true"]})
        (tmp_path / "ds.json").write_text(json.dumps(config_of(places)))
        done = CliRunner().invoke(app, ["notices", str(tmp_path / "ds.json")])
    assert done.exit_code == 1
    assert done.output.splitlines() == [
        "http://127.0.0.1/... has it",
        "http://127.0.0.1/... does not have it: it answered 500 Internal Server Error",
        "the command true has it",
    ]
    assert "a trial (dsx notices)" in web.documents[0]["text"]
    (tmp_path / "none.json").write_text(json.dumps(config_of([])))
    done = CliRunner().invoke(app, ["notices", str(tmp_path / "none.json")])
    assert done.exit_code == 2 and "names nobody to tell; add" in done.output
