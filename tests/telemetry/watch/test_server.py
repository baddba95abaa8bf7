"""What the page answers, to whom, and with which headers."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsx.telemetry.watch.access import HEADERS, Access
from dsx.telemetry.watch.charts import CHARTS
from dsx.telemetry.watch.meanings import MEANINGS
from dsx.telemetry.watch.run import WatchedRun
from dsx.telemetry.watch.server import MOST_CALLERS, MOST_STREAMS
from dsx.telemetry.watch.watch import Watch
from tests.signals import default_sigint
from tests.telemetry.watch.folders import append, make_run, step_record

ROOT = Path(__file__).parents[3]


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Watch]:
    watch = Watch(WatchedRun(make_run(tmp_path / "run")), sign_seconds=0.2)
    yield watch
    watch.close()


def ask(
    page: Watch, path: str = "/", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
    try:
        connection.request(
            method, path, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


def wait_for_step(page: Watch, step: int) -> None:
    """Wait until one cluster is there, and something of each is read."""
    until = time.monotonic() + 10
    while True:
        found = json.loads(ask(page, "/api/state")[2])
        if found.get("step") == step and all("step" in row for row in found["members"]):
            return
        assert time.monotonic() < until
        time.sleep(0.02)


def test_the_page_and_its_files_come_with_headers_that_shut_others_out(page: Watch) -> None:
    status, headers, body = ask(page)
    assert status == 200
    named = re.findall(r'(?:href|src)="(/[^"]+)"', body.decode())
    assert len(named) == 5
    for path in ["/", *named, *(f"/{name}.js" for name in ("chart", "dom", "explain", "lanes"))]:
        status, headers, _ = ask(page, path)
        assert status == 200
        assert headers.items() >= HEADERS.items()
    assert "script-src 'self'" in HEADERS["Content-Security-Policy"]
    assert not re.search(r"https?://(?!www\.w3\.org)", body.decode())  # nothing of elsewhere


@pytest.mark.parametrize(
    "path", ["/nothing", "/../server.py", "/uplot/../watch.css", "//etc/passwd"]
)
def test_nothing_else_is_served(page: Watch, path: str) -> None:
    assert ask(page, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(page: Watch, method: str) -> None:
    status, headers, _ = ask(page, "/api/state", method)
    assert status == 405
    assert headers["Allow"] == "GET, HEAD"
    assert headers.items() >= HEADERS.items()


def test_a_head_has_no_body(page: Watch) -> None:
    status, headers, body = ask(page, "/api/state", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 100


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::"]
)
def test_a_name_that_is_not_of_this_host_reads_nothing(page: Watch, host: str) -> None:
    for path in ("/", "/api/state", "/events"):
        assert ask(page, path, Host=host)[0] == 421


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8765", "LOCALHOST"])
def test_names_of_this_host_are_served_at_any_port(page: Watch, host: str) -> None:
    assert ask(page, "/api/state", Host=host)[0] == 200  # a port that ssh forwards may be another


def test_charts_come_for_the_span_that_is_asked(page: Watch) -> None:
    wait_for_step(page, 40)
    state = json.loads(ask(page, "/api/state")[2])
    for chart in state["charts"]:
        data = json.loads(ask(page, f"/api/chart?key={chart['key']}&axis=time&points=50")[2])
        assert any(value is not None for line in data["lines"] for value in line["y"])
    data = json.loads(ask(page, "/api/chart?key=loss&from=10&to=20")[2])
    assert data["x"][0] == 10
    assert data["x"][-1] == 20
    data = json.loads(ask(page, "/api/chart?key=line")[2])
    assert data["lines"][-1]["name"] == "limit"
    assert set(data["lines"][-1]["y"]) == {12.5e6}  # the run's link.rate_mbit is 100
    data = json.loads(ask(page, "/api/chart?key=loss&from=-1e300&to=1e300&points=7")[2])
    assert len(data["x"]) <= 9
    assert json.loads(ask(page, "/api/lanes")[2])["lanes"]


def test_long_answers_are_packed(page: Watch) -> None:
    wait_for_step(page, 40)
    _, headers, body = ask(page, "/api/chart?key=loss", Accept_Encoding="gzip")
    assert headers["Content-Encoding"] == "gzip"
    assert json.loads(gzip.decompress(body))["chart"] == "loss"


@pytest.mark.parametrize(
    ("query", "told"),
    [("key=less", "key='less' must be one of loss,"), ("key=loss&axis=y", "must be one of step"),
     ("key=loss&from=x", "from='x' must be a number"), ("key=loss&to=nan", "must be a number"),
     ("key=loss&from=9&to=3", "from=9 must not lie behind to=3"),
     ("key=loss&points=1e999", "must be a number"), ("key=loss&last=%FF", "must be a number")],
)  # fmt: skip
def test_what_cannot_be_asked_is_named(page: Watch, query: str, told: str) -> None:
    status, _, body = ask(page, f"/api/chart?{query}")
    assert status == 400
    assert told in body.decode()


def test_a_change_is_sent_at_once_and_a_loss_that_is_no_number_in_words(page: Watch) -> None:
    wait_for_step(page, 40)
    with socket.create_connection(("127.0.0.1", page.port), 10) as caller:
        caller.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        stream = caller.makefile("rb")
        states = (json.loads(line[6:]) for line in stream if line.startswith(b"data: "))
        assert next(states)["step"] == 40
        begun = time.monotonic()
        append(page.run.folder, 0, step_record(0, 41, loss=float("nan")))
        found = next(state for state in states if state["step"] == 41)
        assert time.monotonic() - begun < 2
        assert found["members"][0]["loss"] == "nan"


def test_callers_beyond_the_places_are_cut_off_and_places_come_back(page: Watch) -> None:
    callers: list[socket.socket] = []
    for _ in range(MOST_STREAMS):
        caller = socket.create_connection(("127.0.0.1", page.port), 10)
        caller.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert caller.recv(100).startswith(b"HTTP/1.1 200")
        callers.append(caller)
    assert ask(page, "/events")[0] == 503
    assert ask(page, "/api/state")[0] == 200  # others still have places
    callers += [socket.create_connection(("127.0.0.1", page.port)) for _ in range(MOST_CALLERS)]
    until = time.monotonic() + 10
    for caller in callers:
        caller.close()
    while time.monotonic() < until:
        try:
            if ask(page, "/api/state")[0] == 200:
                break
        except (OSError, http.client.HTTPException):
            time.sleep(0.05)
    assert time.monotonic() < until


def test_elsewhere_than_on_loopback_a_token_is_asked_for(tmp_path: Path) -> None:
    page = Watch(WatchedRun(make_run(tmp_path / "run")), asks_for_token=True)
    try:
        token = page.address.partition("?token=")[2]
        assert len(token) >= 32
        for path in ("/", "/api/state", "/events", "/?token=wrong", "/watch.css"):
            status, headers, _ = ask(page, path)
            assert status == 403
            assert headers.items() >= HEADERS.items()
        status, headers, _ = ask(page, f"/?token={token}")
        assert (status, headers["Location"]) == (303, "/")
        assert headers["Set-Cookie"].endswith("; Path=/; HttpOnly; SameSite=Lax")
        cookie = headers["Set-Cookie"].partition(";")[0]
        assert ask(page, "/", Cookie=f"other=1; {cookie}")[0] == 200
        for others in ("a=b=c; {}", "{}; [x", 'user={{"a": "b, c"}}; {} ', "\x01;{};=;"):
            assert ask(page, "/", Cookie=others.format(cookie))[0] == 200, others
        assert ask(page, "/", Cookie=f"{cookie}x")[0] == 403
        assert ask(page, "/", Cookie=f"x{cookie}; y={cookie}")[0] == 403
        assert ask(page, "/api/state", Authorization=f"Bearer {token}")[0] == 200
        assert ask(page, "/api/state", Cookie="=;;\x01")[0] == 403
    finally:
        page.close()


@pytest.mark.parametrize(
    ("host", "has_token"),
    [("127.0.0.1", False), ("localhost", False), ("::1", False), ("127.1.2.3", False),
     ("0.0.0.0", True), ("::", True), ("10.0.0.7", True), ("node.site", True)],
)  # fmt: skip
def test_which_addresses_need_a_token(host: str, has_token: bool) -> None:
    assert (Access(host, False).token is not None) == has_token


@pytest.mark.parametrize("host", ["[::1]", "::1"])
def test_an_address_of_ipv6_may_stand_in_brackets(tmp_path: Path, host: str) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this host has no IPv6")
    page = Watch(WatchedRun(make_run(tmp_path / "run")), host)
    try:
        assert page.address == f"http://[::1]:{page.port}/"
        with socket.create_connection(("::1", page.port), 10) as caller:
            caller.sendall(b"GET / HTTP/1.1\r\nHost: [::1]\r\n\r\n")
            assert caller.recv(100).startswith(b"HTTP/1.1 200")
    finally:
        page.close()


def test_a_port_that_is_taken_is_named_with_the_fix(page: Watch, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=rf"--port {page.port}: .*in use; give a port that is free"):
        Watch(WatchedRun(tmp_path / "other"), port=page.port)
    with pytest.raises(OSError, match=r"--host no\.such\.host\.invalid --port 0"):
        Watch(WatchedRun(tmp_path / "other"), host="no.such.host.invalid")


def test_every_chart_is_explained_and_every_docs_line_is_there() -> None:
    assert MEANINGS.keys() >= {chart.key for chart in CHARTS}
    for key, meaning in MEANINGS.items():
        assert meaning.keys() == {"means", "bad", "do", "docs"}, key
        path, _, anchor = meaning["docs"].partition("#")
        text = (ROOT / path).read_text()
        titles = re.findall(r"^#+ (.*)$", text, re.M)
        slugs = {re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") for title in titles}
        assert not anchor or anchor in slugs or f"#{anchor} }}" in text, meaning["docs"]


def test_the_command_serves_until_it_is_interrupted_and_imports_no_torch(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    code = (
        "import sys; from dsx.cli import app\n"
        "try: app(sys.argv[1:])\nfinally: print('torch imported:', 'torch' in sys.modules)"
    )
    run = str(tmp_path / "run")
    command = [sys.executable, "-c", code, "watch", run, "--port", "0", "--no-browser"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"}, preexec_fn=default_sigint,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    port = re.search(r" at http://127\.0\.0\.1:(\d+)/$", line)
    assert port, line
    assert process.stdout.readline() == "dsx watch: Ctrl-C ends it\n"
    with socket.create_connection(("127.0.0.1", int(port[1])), 10) as caller:  # somebody looks
        caller.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert caller.recv(100).startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == "dsx watch: ended\ntorch imported: False\n"
    assert err == ""


def test_a_fault_of_ours_is_answered_and_does_not_end_what_follows(
    page: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_step(page, 40)

    def fails(*_: object) -> None:
        raise KeyError("tag")

    with monkeypatch.context() as patched:
        patched.setattr("dsx.telemetry.watch.watch.state", fails)
        for path in ("/api/state", "/events"):
            status, _, body = ask(page, path)
            assert status == 500
            assert "could not be shown (KeyError: 'tag')" in body.decode()
    with monkeypatch.context() as patched:
        patched.setattr(WatchedRun, "poll", fails)
        until = time.monotonic() + 10
        while "KeyError: 'tag'" not in json.loads(ask(page, "/api/state")[2])["trouble"]:
            assert time.monotonic() < until
            time.sleep(0.05)
    append(page.run.folder, 0, step_record(0, 41))
    wait_for_step(page, 41)
    until = time.monotonic() + 10
    while json.loads(ask(page, "/api/state")[2])["trouble"]:
        assert time.monotonic() < until
        time.sleep(0.02)
