"""`dsx watch --join` over a line of 2 Mbit/s that a run over links is on: a namespace for each."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsx.bench.namespaces import TestbedUnavailable
from dsx.bench.testbed import Line, Testbed
from tests.installed import needs
from tests.telemetry.test_measured_rates import write_measured
from tests.telemetry.watch.live_run import NAMES, ROOT, LiveRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs("zmq", "cryptography")]
WATCHER = 2  # its namespace
PORT = 8765
LOOK_SECONDS = 20.0
LINE_BYTES = 250_000.0  # a second
SHARE = 0.02  # of what was measured, by each of the two clusters, and what TCP adds
ASK = (
    "import sys, urllib.request;"
    f"sys.stdout.buffer.write(urllib.request.urlopen('http://127.0.0.1:{PORT}/api/state').read())"
)


@pytest.fixture
def testbed() -> Iterator[Testbed]:
    try:
        with Testbed(3, Line(2)) as made:
            yield made
    except TestbedUnavailable as error:
        pytest.skip(str(error))


def wait_for(is_so: Callable[[], bool], live: LiveRun, seconds: float = 240) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, live.logs()
        time.sleep(0.5)


def records(live: LiveRun, kind: str, since: float = 0.0) -> list[dict[str, Any]]:
    path = live.directory / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("}")]
    return [one for one in found if one["kind"] == kind and one["time"] > since]


def shown(testbed: Testbed) -> dict[str, Any]:
    """Return the page's state, as somebody beside it reads it; empty while there is no page."""
    command = ["ip", "netns", "exec", testbed.namespace(WATCHER), sys.executable, "-c", ASK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout) if done.returncode == 0 else {}


def steps_shown(testbed: Testbed) -> list[int]:
    return [row.get("step", 0) for row in shown(testbed).get("members", [])]


def bytes_a_second(testbed: Testbed, live: LiveRun, what: str) -> float:
    """Return what comes to the watcher in a while, and print how the run goes beside it."""
    before, begun = [testbed.traffic(m) for m in range(3)], time.time()
    time.sleep(LOOK_SECONDS)
    seconds = time.time() - begun
    passed = [testbed.traffic(m) - before[m] for m in range(3)]
    syncs = records(live, "sync", begun)
    carried = sum(s["bytes_sent"] for s in syncs) / sum(s["transfer_seconds"] for s in syncs)
    watched = passed[WATCHER].bytes_received / seconds
    print(
        f"{what}: {len(records(live, 'step', begun)) / seconds:.2f} steps/s, transfers carry "
        f"{carried / 1e3:.0f} kB/s, cluster 0 sends {passed[0].bytes_sent / seconds / 1e3:.0f} "
        f"kB/s, the watcher gets {watched / 1e3:.1f} kB/s"
    )
    return watched


@pytest.mark.parametrize("told", [0, 6000])  # letters in each step's records: behind for ever
def test_a_watcher_takes_little_of_a_slow_line(testbed: Testbed, tmp_path: Path, told: int) -> None:
    measured = write_measured(tmp_path / "net.json", 2, all_reduce=[
        {"streams": 1, "bits_per_second": 1.9e6}])  # fmt: skip
    live = LiveRun(tmp_path, testbed=testbed, width=2000, told=told, net_test=measured)
    try:
        for cluster in range(2):
            live.start(cluster)
        wait_for(lambda: len(records(live, "step")) > 50, live)
        assert bytes_a_second(testbed, live, "alone") < 500
        config = json.loads((tmp_path / f"{NAMES[0]}.json").read_text())
        place = config["dsx"]["link"]["members"][0].partition("=")[2]
        log = (tmp_path / "watch.log").open("wb")
        testbed.start(
            WATCHER,
            [sys.executable, "-m", "dsx", "watch", "--join", place, "--keys",
             str(tmp_path / "keys" / NAMES[1]), "--dir", str(tmp_path / "copy"), "--port",
             str(PORT), "--no-browser", "--seconds", "120"],
            {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, log.fileno(),
        )  # fmt: skip
        if not told:
            wait_for(lambda: min(steps_shown(testbed), default=0) > 50, live)
        else:
            wait_for(lambda: bool(steps_shown(testbed)), live)
        share = bytes_a_second(testbed, live, "watched") / LINE_BYTES
        assert 0.001 < share < 2 * SHARE * 1.25
        for _ in range(0 if told else 5):
            trained = records(live, "step")[-1]["step"]
            wait_for(lambda trained=trained: min(steps_shown(testbed)) >= trained, live, 15)
            time.sleep(1)
        assert "does not answer" not in json.dumps(shown(testbed))
    finally:
        live.close()
