"""What a long run costs: the server's memory, the first chart, moving about, a browser's heap."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dsx.telemetry.run_folder import cluster_file
from tests.telemetry.watch.browser import opened, with_browser
from tests.telemetry.watch.folders import BEGUN, about, records, start_record, write_about

pytestmark = [pytest.mark.ci, with_browser]
ROUNDS, CLUSTERS = 100_000, 4
LOSS = "document.querySelector('#chart-loss .picture')"
MOVE = """async () => {
  const over = document.querySelector('#chart-loss .u-over');
  const side = over.getBoundingClientRect();
  const at = (type, by) => over.dispatchEvent(new PointerEvent(type, {bubbles: true, shiftKey: true,
    clientX: side.left + 300 + by, clientY: side.top + 50}));
  const frame = () => new Promise((then) => requestAnimationFrame(then));
  at('pointerdown', 0);
  const times = [];
  for (let n = 0; n < 60; n += 1) {
    const begun = performance.now();
    at('pointermove', 2 * n);
    await frame();
    times.push(performance.now() - begun);
  }
  at('pointerup', 120);
  return times;
}"""


def write_long_run(folder: Path, clusters: int, rounds: int) -> None:
    """Write a step and a sync for each round, as fast as text can be put together."""
    for cluster in range(clusters):
        write_about(folder, cluster, about(cluster, clusters))
        step, sync = (json.dumps(record) for record in list(records(cluster, 8))[-2:])
        with cluster_file(folder, "metrics", ".jsonl", cluster).open("w") as file:
            file.write(json.dumps(start_record(cluster, clusters)) + "\n")
            for number in range(1, rounds + 1):
                loss = 2 + 100 / (number + 99) + 0.01 * ((7919 * number) % 13)
                file.write(_with(step, step=number, time=BEGUN + number, loss=loss))
                file.write(_with(sync, launched_step=number - 1, applied_step=number,
                                 time=BEGUN + number, round=number))  # fmt: skip


def _with(text: str, **fields: float) -> str:
    """Return a record's line with other numbers: of equal names the last one counts."""
    more = ", ".join(f'"{name}": {value}' for name, value in fields.items())
    return f"{text[:-1]}, {more}}}\n"


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run the command in a process of its own; yield its address."""
    code = "import sys; from dsx.cli import app; app(sys.argv[1:])"
    command = [sys.executable, "-c", code, "watch", str(folder), "--port", "0", "--no-browser"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found
        yield found[0], process
    finally:
        process.terminate()
        process.wait()


def ask(address: str, path: str) -> Any:
    with urllib.request.urlopen(address + path, timeout=30) as answer:
        return json.load(answer)


def most_memory_mb(process: subprocess.Popen[str]) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1]) / 1000


def test_a_hundred_thousand_rounds_of_four_clusters(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_long_run(folder, CLUSTERS, ROUNDS)
    size = sum(path.stat().st_size for path in folder.iterdir())
    with served(folder) as (address, process):
        begun = time.monotonic()
        with opened("about:blank") as tab:
            opening = time.monotonic()
            tab.page.goto(address)
            tab.wait(f"{LOSS}?.querySelector('canvas') && {LOSS}.ariaLabel", 60)
            first = time.monotonic() - opening
            span = ask(address, "api/chart?key=loss")["whole"]
            assert span[0] < ROUNDS / 100
            assert span[1] > 0.99 * ROUNDS
            while ask(address, "api/state")["read_share"] < 1:
                assert time.monotonic() < begun + 120
                time.sleep(0.2)
            read = time.monotonic() - begun
            asked = time.monotonic()
            assert len(ask(address, "api/chart?key=loss&points=1000")["x"]) >= 900
            answer = time.monotonic() - asked
            near = ask(address, "api/chart?key=loss&from=50000&to=50100&points=1000")
            assert near["x"] == list(range(50000, 50101))
            tab.page.focus("#chart-loss .picture")
            tab.page.keyboard.press("+")
            tab.wait("!document.querySelector('#whole').hidden")
            tab.page.wait_for_timeout(1000)
            times = tab.page.evaluate(MOVE)
            frames = len(times) / (sum(times) / 1000)
        memory = most_memory_mb(process)
    print(
        f"\n{size / 1e6:.0f} MB of records: first chart {first:.2f} s after the page is opened, "
        f"all read in {read:.1f} s, a chart's points in {1000 * answer:.0f} ms, "
        f"{frames:.0f} frames/s while moving, {memory:.0f} MB of the server at most"
    )
    assert first < 2
    assert memory < 300
    assert frames > 30


def test_a_day_stays_within_the_heap_of_a_browser(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    day, parts = 86_400, 24
    for cluster in (0, 1):
        write_about(folder, cluster, about(cluster))
    with served(folder) as (address, _), opened(address) as tab:
        session = tab.page.context.new_cdp_session(tab.page)
        for part in range(parts):
            first, last = part * day // parts + 1, (part + 1) * day // parts
            for cluster in (0, 1):
                with cluster_file(folder, "metrics", ".jsonl", cluster).open("a") as file:
                    lines = (json.dumps(record) for record in records(cluster, last, first))
                    file.write("\n".join(lines) + "\n")
            step = f"{last:,}"
            tab.wait(f"document.querySelector('#sentence').innerText.includes('{step}')", 60)
            for axis in ("time", "tokens", "step") * 4:  # as many looks as an hour has
                tab.page.select_option("#axis", axis)
                tab.page.wait_for_timeout(30)
        tab.page.wait_for_timeout(3000)
        session.send("HeapProfiler.collectGarbage")
        used = session.send("Runtime.getHeapUsage")["usedSize"] / 1e6
        nodes = tab.page.evaluate("document.querySelectorAll('*').length")
    print(f"\na day of two clusters: {used:.1f} MB of heap, {nodes} elements")
    assert used < 200
    assert nodes < 5000
