"""The page of a cluster: what it serves, at which port, and what is said where it cannot."""

from __future__ import annotations

import multiprocessing
import socket
import sys
import threading
import time
import urllib.request
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import dsx
from dsx.comm.address import page_address
from dsx.comm.world import current_world
from dsx.telemetry.figures import FIGURES, Figures
from dsx.telemetry.prometheus import Page
from tests.distributed import free_port, run_distributed
from tests.installed import needs
from tests.over_links import run_over_links
from tests.telemetry.test_measured_rates import write_measured
from tests.tiny import TinyNet, batch

HOST = "127.0.0.1"
with_client = needs("prometheus_client")


def fetch(port: int) -> str:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return answer.read().decode()


def parsed(text: str) -> dict[str, Any]:
    """Return the families of a page by name, as Prometheus' own parser reads them."""
    from prometheus_client.parser import text_string_to_metric_families

    return {family.name: family for family in text_string_to_metric_families(text)}


def values(text: str) -> dict[str, float]:
    """Return the numbers that have no labels beside `cluster`."""
    samples = [sample for family in parsed(text).values() for sample in family.samples]
    return {s.name: s.value for s in samples if s.labels.keys() == {"cluster"}}


@pytest.mark.parametrize(
    ("place", "clusters", "found"),
    [("127.0.0.1:9464", 2, ("127.0.0.1", 9464)), ("[::1]:1", 1, ("::1", 1)),
     ("metrics.site:65530", 6, ("metrics.site", 65530))],
)  # fmt: skip
def test_places_that_are_read(place: str, clusters: int, found: tuple[str, int]) -> None:
    assert page_address(place, clusters) == found


@pytest.mark.parametrize(
    "place",
    ["9464", ":9464", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:http", "127.0.0.1:70000", "[::1",
     "http://127.0.0.1:9464", "me@127.0.0.1:9464", "127.0.0.1:9464/metrics", "a\tb:1"],
)  # fmt: skip
def test_places_that_are_none_are_named_with_the_fix(place: str) -> None:
    with pytest.raises(ValueError, match=r'must be HOST:PORT.*write.*"127.0.0.1:9464"'):
        page_address(place)


def test_every_cluster_needs_a_port() -> None:
    with pytest.raises(ValueError, match=r"no port for cluster 6: .* give 65529 or less"):
        page_address("127.0.0.1:65530", 7)


@with_client
def test_the_page_has_names_texts_and_types() -> None:
    figures, port = Figures(3, 4, True, ["gain"]), free_port()
    figures.started("diloco", "1.2")
    figures.begin(7, 0, None)
    page = Page(HOST, port - 3, figures)
    try:
        found = parsed(fetch(port))
    finally:
        page.close()
    assert {s.labels["cluster"] for f in found.values() for s in f.samples} == {"3"}
    by_name = {figure.name.removesuffix("_total"): figure for figure in FIGURES}
    assert {*found} <= {*by_name}
    for name, family in found.items():
        figure = by_name[name]
        assert (family.type, family.documentation) == (figure.kind, figure.meaning)
        assert all({*s.labels} == {"cluster", *figure.labels} for s in family.samples)
        assert all(s.name == figure.name for s in family.samples)  # no _created beside it
    assert found["dsx_step"].samples[0].value == 7
    assert found["dsx_guard_alarms"].samples[0].labels == {"cluster": "3", "alarm": "gain"}
    with pytest.raises(OSError):
        fetch(port)


@with_client
def test_a_port_that_is_taken_is_named_with_the_fix() -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError) as caught:
            Page(HOST, port - 1, Figures(1, 2, True))
    said = str(caught.value)
    assert f"dsx.metrics.prometheus={HOST}:{port - 1}: cluster 1 serves at port {port}" in said
    assert "Address already in use; end what listens there" in said


@with_client
@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_host_is_named(host: str) -> None:
    with pytest.raises(OSError, match=r"and cannot: .*give an address of this host"):
        Page(host, 9464, Figures(0, 2, True))


@with_client
def test_callers_that_say_nothing_take_few_threads_and_leave_them() -> None:
    port, before = free_port(), threading.active_count()
    page = Page(HOST, port, Figures(0, 1, True))
    silent = [socket.create_connection((HOST, port), 10) for _ in range(40)]
    try:
        for one in silent[16:]:
            one.settimeout(10)
            with suppress(ConnectionResetError):
                assert one.recv(1) == b""  # cut off at once
        assert threading.active_count() <= before + 1 + 16
        for one in silent:
            one.close()
        until = time.monotonic() + 30
        while threading.active_count() > before + 1 and time.monotonic() < until:
            time.sleep(0.05)
        assert "dsx_" in fetch(port)
    finally:
        page.close()


@with_client
def test_an_address_that_no_name_server_takes_is_named() -> None:
    with pytest.raises(OSError, match=r"dsx.metrics.prometheus=a..b:9464: cluster 0 serves"):
        Page("a..b", 9464, Figures(0, 1, True))


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "dsx-train\[prometheus\]"'):
        Page(HOST, free_port(), Figures(0, 2, True))


@with_client
def test_a_worker_that_stays_behind_does_not_keep_the_port() -> None:
    port = free_port()
    page = Page(HOST, port, Figures(0, 1, True))
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    try:
        page.close()
        again = Page(HOST, port, Figures(0, 1, True))
        assert "dsx_steps_total" in fetch(port)
        again.close()
    finally:
        worker.kill()
        worker.join()


def config_of(port: int) -> dict[str, Any]:
    clusters = {"num_clusters": 2, "deadline_seconds": 30}
    metrics = {"prometheus": f"{HOST}:{port}"}
    schedule = {"interval": 4}
    block = {"preset": "diloco", "clusters": clusters, "schedule": schedule, "metrics": metrics}
    return {"dsx": block}


def attach(cluster: int, config: dict[str, Any]) -> tuple[Any, Any, Any]:
    model = TinyNet(cluster)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, dsx.attach(model, optimizer, config=config)


def train(port: int) -> dict[str, Any]:
    """Train a cluster, look at both pages, and attach once more while the first one is open."""
    config = config_of(port)
    world = dsx.init_distributed(config)
    model, optimizer, handle = attach(world.cluster_id, config)
    for step in range(1, 11):
        optimizer.zero_grad()
        loss = model(*batch(world.cluster_id, step))
        loss.backward()
        optimizer.step()
        handle.log_step(loss=float(world.cluster_id), tokens=7)
    handle.finish()
    pages = [fetch(port + cluster) for cluster in range(2)]
    handle.gather(None)  # nobody takes its page away while the other looks
    with pytest.raises(ValueError) as caught:
        attach(world.cluster_id, config)
    said = [str(caught.value)]
    handle.close()
    with socket.socket() if world.cluster_id == 0 else nullcontext() as other:
        if other is not None:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind((HOST, port))
            other.listen()
        with pytest.raises(ValueError) as caught:
            attach(world.cluster_id, config)
        said.append(str(caught.value))
    attach(world.cluster_id, config)[2].close()  # what was closed, or could not be, has let go
    return {"pages": pages, "said": said, "sent": handle._syncs.bytes_sent}


@with_client
def test_two_clusters_of_one_host_have_a_page_each() -> None:
    """Without a folder for records; and what cannot be is told to all clusters."""
    port = free_port()
    both = run_distributed(train, 2, port)
    assert [[*parsed(page)] for page in both[0]["pages"]] == [
        [*parsed(page)] for page in both[1]["pages"]
    ]
    for cluster, told in enumerate(both):
        found = values(told["pages"][cluster])
        assert (found["dsx_step"], found["dsx_steps_total"]) == (10, 10)
        assert found["dsx_loss"] == cluster and found["dsx_tokens_total"] == 70
        assert found["dsx_members"] == found["dsx_clusters"] == 2
        assert found["dsx_sent_bytes_total"] == told["sent"] > 0
        assert found["dsx_interval_steps"] == 4 and found["dsx_syncs_total"] > 0
        assert 0 < found["dsx_blocked_seconds_total"] < found["dsx_step_seconds_total"]
        assert found["dsx_missing_records"] == 0
        for said in told["said"]:  # by all, also where the other one's port is free
            assert said.startswith(f"cluster 0: dsx.metrics.prometheus={HOST}:{port}: cluster 0")
            assert "another engine of this process" in said


def train_at_a_rate(port: int, measured: str) -> dict[str, float]:
    """Train a cluster over links, at the rate that `dsx ctl set link.rate_mbit 8` sets."""
    config, world = config_of(port), current_world()
    assert world is not None
    config["dsx"]["metrics"]["net_test"] = measured
    model, optimizer, handle = attach(world.cluster_id, config)
    before = values(fetch(port + world.cluster_id)) if world.rank == 0 else {}
    world.limit_rate(8.0)
    for step in range(1, 11):
        optimizer.zero_grad()
        model(*batch(world.cluster_id, step)).backward()
        optimizer.step()
    handle.finish()
    text = fetch(port + world.cluster_id) if world.rank == 0 else ""
    samples = [sample for family in parsed(text).values() for sample in family.samples]
    found = {**values(text), **{s.name: s.value for s in samples if "member" in s.labels}}
    handle.close()
    assert "dsx_line_limit_bytes_per_second" not in before
    return found


@pytest.mark.ci
@with_client
@needs("zmq", "cryptography")
def test_the_rate_of_a_line_is_on_the_page(tmp_path: Path) -> None:
    measured = write_measured(tmp_path / "net.json", 2, security="none")
    for found in run_over_links(train_at_a_rate, 2, 1, free_port(), str(measured)):
        assert found["dsx_line_limit_bytes_per_second"] == 1e6
        assert found["dsx_line_measured_bytes_per_second"] == 11.75e6
        assert found["dsx_link_measured_bytes_per_second"] in (12.5e6, 15e6)
        assert found["dsx_link_sent_bytes_total"] > 0
