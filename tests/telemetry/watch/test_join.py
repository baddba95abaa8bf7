"""Two clusters of real processes, watched by --join from a host with a key alone; one is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.installed import needs
from tests.telemetry.watch.live_run import NAMES, LiveRun

pytestmark = [pytest.mark.ci, pytest.mark.timeout(240), needs("zmq", "cryptography")]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRun]:
    run = LiveRun(tmp_path)
    yield run
    run.close()


def state_until(address: str, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the page's state once it is as wanted."""
    until = time.monotonic() + 90
    found: dict[str, Any] = {}
    while True:
        with urllib.request.urlopen(f"{address}api/state", timeout=10) as answer:
            found = json.load(answer)
        if is_so(found):
            return found
        assert time.monotonic() < until, found
        time.sleep(0.2)


@contextmanager
def watched(live: LiveRun, folder: Path, named: int) -> Iterator[tuple[str, Path]]:
    """Watch by the address of one cluster; yield the page's, and where records are copied."""
    config = json.loads((folder / f"{NAMES[0]}.json").read_text())
    place = config["dsx"]["link"]["members"][named].partition("=")[2]
    keys = folder / "keys" / NAMES[1]
    copy, log = folder / "copy", (folder / "watch.log").open("w+b")
    watch = subprocess.Popen(
        [sys.executable, "-m", "dsx", "watch", "--join", place, "--keys", str(keys), "--dir",
         str(copy), "--port", "0", "--no-browser", "--seconds", "120"],
        stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        said, until = "", time.monotonic() + 120
        while not (at := re.search(r"at (http://\S+)", said)):
            assert watch.poll() is None and time.monotonic() < until, said + live.logs()
            time.sleep(0.2)
            said = (folder / "watch.log").read_text()
        yield at[1], copy
    finally:
        watch.send_signal(signal.SIGINT)
        watch.wait(20)


def steps(found: dict[str, Any]) -> list[int]:
    return [row.get("step", 0) for row in found.get("members", [])]


@pytest.fixture
def behind_a_gateway(tmp_path: Path) -> Iterator[LiveRun]:
    run = LiveRun(tmp_path, ranks=2, num_called=1)
    yield run
    run.close()


def test_a_cluster_of_several_ranks_is_called_at_its_gateway_and_asked_for_the_other(
    behind_a_gateway: LiveRun, tmp_path: Path
) -> None:
    live = behind_a_gateway
    for cluster in range(2):
        live.start(cluster)
    with watched(live, tmp_path, named=0) as (address, copy):
        found = state_until(address, lambda found: min(steps(found), default=0) > 10)
        assert len(steps(found)) == 2 and "does not answer" not in json.dumps(found)
        found = state_until(address, lambda found: len(found["links"]) == 2)
        assert {(link["of"], link["to"]) for link in found["links"]} == {(0, 1), (1, 0)}
    for name in ("metrics.jsonl", "metrics.cluster_1.jsonl"):
        whole, part = ((at / name).read_bytes() for at in (live.directory, copy))
        assert len(part) > 1000 and whole.startswith(part)


def test_two_clusters_are_watched_by_one_address_and_one_is_killed(
    live: LiveRun, tmp_path: Path
) -> None:
    for cluster in range(2):
        live.start(cluster)
    with watched(live, tmp_path, named=1) as (address, copy):
        state_until(address, lambda found: len(steps(found)) == 2 and min(steps(found)) > 10)
        live.kill(1)  # the one that was named
        before = steps(state_until(address, lambda found: bool(steps(found))))[0]
        found = state_until(address, lambda found: steps(found)[0] > before + 20)
        assert "oslo (cluster 1) does not answer" in json.dumps(found)
        said = (tmp_path / "watch.log").read_text()
        silent = [line for line in said.splitlines() if "does not answer" in line]
        assert [line for line in silent if "no records yet" not in line] == silent[-1:], said
        assert "asked through berlin: " in silent[-1], said
        live.start(1)
        last = steps(found)[1]
        found = state_until(
            address, lambda found: steps(found)[1] > last and "does not" not in json.dumps(found)
        )
        assert "dsx watch: oslo (cluster 1) answers" in (tmp_path / "watch.log").read_text()
    for name in ("metrics.jsonl", "metrics.cluster_1.jsonl"):
        whole = (live.directory / name).read_bytes()
        part = (copy / name).read_bytes()
        assert len(part) > 1000 and whole.startswith(part)
