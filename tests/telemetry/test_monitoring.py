"""What ships for Prometheus and Grafana: of figures that are there, and read by Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import dsx
from dsx.comm.address import page_address
from dsx.telemetry.figures import FIGURES, Figures
from dsx.telemetry.prometheus import Page
from tests.distributed import free_port, run_distributed
from tests.docs.pages import read
from tests.installed import needs
from tests.telemetry.test_figures import step, sync
from tests.telemetry.test_prometheus import HOST, attach, config_of, fetch, with_client
from tests.tiny import batch

FOLDER = Path(__file__).parents[2] / "configs" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana" / "dashboards" / "dsx.json").read_text())
KINDS = {figure.name: figure for figure in FIGURES}
COUNTED = re.compile(r"\b(?:rate|increase)\(\s*(\w+)")
SECONDS = 240  # for Prometheus to have seen something, on a busy machine

with_yaml = needs("yaml")


def document(name: str) -> Any:
    import yaml

    return yaml.safe_load((FOLDER / name).read_text())


def rules() -> list[dict[str, Any]]:
    return [rule for group in document("alerts.yml")["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def shown() -> list[str]:
    """Every expression of the dashboard."""
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def require_known(expression: str, recorded: set[str]) -> None:
    """Names are figures or recorded; what is counted is a counter, and only that."""
    named = set(re.findall(r"\bdsx_\w+|\bdsx:[\w:]+", expression))
    assert named <= {*KINDS} | recorded, expression
    for name in named & {*KINDS}:
        is_counted = name in COUNTED.findall(expression)
        assert is_counted == (KINDS[name].kind == "counter"), f"{name} in {expression}"


@with_yaml
def test_expressions_name_figures_that_are_there() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    alerts = [rule["alert"] for rule in rules() if "alert" in rule]
    assert len(alerts) == len(set(alerts)) >= 9 and len(shown()) > 40
    for expression in [*(rule["expr"] for rule in rules()), *shown()]:
        require_known(expression, recorded)
    everywhere = " ".join([*(rule["expr"] for rule in rules()), *shown()])
    silent = [name for name in KINDS if not re.search(rf"\b{name}\b", everywhere)]
    assert silent == []  # a figure that nobody looks at


@with_yaml
def test_alerts_say_what_is_so_and_what_to_do() -> None:
    page = read("docs/monitoring.md")
    for rule in rules():
        if "alert" in rule:
            assert {*rule["annotations"]} == {"summary", "description"}, rule
            assert rule["labels"]["severity"] in ("warning", "critical"), rule
            assert f"| `{rule['alert']}` |" in page, rule["alert"]


@with_yaml
def test_files_fit_together() -> None:
    config, compose = document("prometheus.yml"), document("compose.yaml")
    assert all((FOLDER / name).is_file() for name in config["rule_files"])
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "dsx"  # as alerts.yml has it
    targets = job["static_configs"][0]["targets"]
    assert [page_address(t) for t in targets] == [(HOST, 9464), (HOST, 9465)]
    for name, service in compose["services"].items():
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"]), name
        mounts = [mount.split(":")[0] for mount in service["volumes"]]
        assert [m for m in mounts if m.startswith(".") and not (FOLDER / m).exists()] == []
    source = document("grafana/provisioning/datasources/dsx.yml")["datasources"][0]
    assert (
        f"--web.listen-address={urllib.parse.urlsplit(source['url']).netloc}"
        in (compose["services"]["prometheus"]["command"])
    )
    provider = document("grafana/provisioning/dashboards/dsx.yml")["providers"][0]
    path = provider["options"]["path"]
    assert f"./grafana/dashboards:{path}:ro" in compose["services"]["grafana"]["volumes"]
    sources = {p["datasource"]["uid"] for p in panels()}
    assert sources | {DASHBOARD["templating"]["list"][0]["datasource"]["uid"]} == {source["uid"]}
    environment = compose["services"]["grafana"]["environment"]
    assert environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{path}/dsx.json"


def test_panels_lie_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert max(x for x, _ in own) < 24 and not taken & own, panel["title"]
        taken |= own
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def tool(name: str) -> str:
    """Return the path of a program of Prometheus', or skip by its name."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (Debian, Ubuntu: apt install prometheus)")
    return path


@pytest.mark.ci
@with_client
def test_promtool_finds_nothing_wrong() -> None:
    promtool, port = tool("promtool"), free_port()
    figures = Figures(0, 2, True, ["gain"])
    figures.started("diloco", "1.0")
    figures.step(step(1), (0, 1))
    figures.sync(sync(cluster_cosine=0.5, norm_ratio=1.0, autocorrelation=0.1, effective_gain=1.0))
    figures.saved(FOLDER, 1)
    page = Page(HOST, port, figures)
    text = fetch(port)
    page.close()
    tests = Path(__file__).with_name("alerts_test.yml")
    for arguments, given in (
        (["check", "metrics"], text),
        (["check", "rules", "alerts.yml"], ""),
        (["check", "config", "prometheus.yml"], ""),
        (["test", "rules", str(tests)], ""),
    ):
        done = subprocess.run(
            [promtool, *arguments], cwd=FOLDER, input=given, capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        assert given == "" or done.stdout + done.stderr == ""  # not even advice


def train(port: int, stop: str) -> int:
    """Train a cluster that tells all it can until a file is there; it saves every hundred steps."""
    config = config_of(port)
    config["dsx"]["metrics"]["dir"] = str(Path(stop).with_name("run"))
    world = dsx.init_distributed(config)
    model, optimizer, handle = attach(world.cluster_id, config)
    while not handle.should_stop():
        optimizer.zero_grad()
        loss = model(*batch(world.cluster_id, handle.step + 1))
        loss.backward()
        optimizer.step()
        handle.log_step(loss=loss.item(), tokens=4, total_steps=1_000_000)
        if handle.step % 100 == 0:
            saved = Path(stop).with_name(f"saved_{world.cluster_id}") / f"step{handle.step}"
            with handle.saving():
                handle.save(saved)
            handle.saved(saved)
        if Path(stop).exists():
            handle.request_stop("it has been seen")
        time.sleep(0.02)
    handle.finish()
    steps = handle.step
    handle.close()
    return steps


class Server:
    """A Prometheus that runs, by its API."""

    def __init__(self, port: int) -> None:
        self._address = f"http://{HOST}:{port}/api/v1"

    def ask(self, what: str, **query: str) -> Any:
        address = f"{self._address}/{what}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            told = json.load(answer)
        assert told["status"] == "success", told
        return told["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        return self.ask("query", query=expression)["result"]

    def wait_for(self, expression: str, count: int) -> list[dict[str, Any]]:
        """Return what an expression gives, once there are so many; AssertionError if that lasts."""
        until, found = time.monotonic() + SECONDS, "nothing yet"
        while time.monotonic() < until:
            try:
                result = self.query(expression)
                if len(result) >= count:
                    return result
                found = str(result)
            except OSError as error:  # it is not there yet
                found = str(error)
            time.sleep(0.2)
        raise AssertionError(f"{expression} has not given {count} in {SECONDS} s: {found}")


@contextmanager
def prometheus(folder: Path, first_port: int) -> Iterator[Server]:
    """Start a Prometheus as configured, but for the ports and that it looks every second."""
    program, own = tool("prometheus"), free_port()
    shutil.copy(FOLDER / "alerts.yml", folder)
    text = (FOLDER / "prometheus.yml").read_text().replace("15s", "1s")
    for cluster in range(2):
        text = text.replace(f"{HOST}:{9464 + cluster}", f"{HOST}:{first_port + cluster}")
    (folder / "prometheus.yml").write_text(text)
    command = [
        program, f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={HOST}:{own}",
    ]  # fmt: skip
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            yield Server(own)
        finally:
            process.terminate()
            process.wait(30)


@pytest.mark.ci
@pytest.mark.timeout(1200)
@with_client
def test_a_prometheus_reads_a_run_of_two_clusters(tmp_path: Path) -> None:
    """It scrapes both pages, evaluates every rule, and answers all that the dashboard asks."""
    port, stop = free_port(), tmp_path / "stop"
    with prometheus(tmp_path, port) as server, ThreadPoolExecutor(1) as pool:
        run = pool.submit(run_distributed, train, 2, port, str(stop), timeout_seconds=600)
        try:
            server.wait_for("up == 1", 2)
            server.wait_for("dsx_syncs_total > 2", 2)
            server.wait_for("dsx_checkpoint_step > 0", 2)
            server.wait_for("dsx:utilization:ratio_rate5m", 2)
            clusters = {s["metric"]["cluster"] for s in server.query("dsx_step > 0")}
            members = {s["value"][1] for s in server.query("dsx_members")}
            evaluated = [r for g in server.ask("rules")["groups"] for r in g["rules"]]
            for expression in shown():
                server.query(expression.replace("$cluster", ".*"))
            empty = [e for e in shown() if not server.query(e.replace("$cluster", ".*"))]
            firing = server.query('ALERTS{alertstate="firing"}')
        finally:
            stop.touch()
            steps = run.result(600)
    assert clusters == {"0", "1"} and members == {"2"} and steps[0] == steps[1] > 0
    assert {rule["health"] for rule in evaluated} == {"ok"}, evaluated
    assert {rule["name"] for rule in evaluated} == {
        rule.get("alert", rule.get("record")) for rule in rules()
    }
    assert {expression.partition("{")[0] for expression in empty} == {
        "dsx_line_limit_bytes_per_second",
        "dsx_device_peak_bytes",
        "dsx_device_bytes",
        "dsx_link_round_trip_seconds",
        "dsx_link_least_round_trip_seconds",
        "dsx_line_measured_bytes_per_second",
        "dsx_link_measured_bytes_per_second",
        "rate(dsx_link_sent_bytes_total",
        "rate(dsx_link_received_bytes_total",
        "dsx_checkpoint_copied_step",
    }  # no rate is set, there is no accelerator, it is over gloo, and saves are copied nowhere
    assert {f["metric"]["alertname"] for f in firing} <= {"DsxGuardAlarm"}  # a model of few steps
