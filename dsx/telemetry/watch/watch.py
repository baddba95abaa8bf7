"""`dsx watch`: follows a run, serves its page, and ends with Ctrl-C."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Collection, Mapping
from typing import Any

from dsx.telemetry.prometheus import page_of
from dsx.telemetry.watch.access import Access, is_loopback
from dsx.telemetry.watch.charts import AXES, BY_KEY, View, axes_of, chart_data
from dsx.telemetry.watch.lanes import lanes
from dsx.telemetry.watch.meanings import MEANINGS
from dsx.telemetry.watch.replay import Replays
from dsx.telemetry.watch.run import WatchedRun
from dsx.telemetry.watch.server import PageServer, address_of
from dsx.telemetry.watch.state import line_levels, state

_POLL_SECONDS = 0.3
_SIGN_SECONDS = 5.0


class Watch:
    """A page of a run, from now until `close`. OSError where the port cannot be had.

    `sign_seconds` lie between two states of a run that does not change.
    """

    def __init__(
        self,
        run: WatchedRun,
        host: str = "127.0.0.1",
        port: int = 0,
        against: WatchedRun | None = None,
        asks_for_token: bool = False,
        sign_seconds: float = _SIGN_SECONDS,
        alarms: Collection[str] = (),
        has_disk: bool = True,
    ) -> None:
        """`alarms` are the guard's; `has_disk`: the records lie where the clusters write them."""
        self.run = run
        if importlib.util.find_spec("prometheus_client") is not None:
            run.replays = Replays(alarms, run.folder if has_disk else None)
        self._sign_seconds = sign_seconds
        self._against = against
        self._changed = threading.Condition()
        self._version = -1
        self._ends = threading.Event()
        access = Access(host, asks_for_token)
        answers = {
            "/api/state": self._state,
            "/api/chart": self._chart,
            "/api/lanes": self._lanes,
            "/api/meanings": _meanings,
        }
        try:
            texts = {"/metrics": self._metrics}
            self._server = PageServer(host, port, access, answers, self._next_state, texts)
        except (OSError, OverflowError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise OSError(
                f"--host {host} --port {port}: the page cannot be served there: {why}; give a port "
                "that is free (0: any) and an address of this host"
            ) from error
        self.port = self._server.server_port
        place = address_of(host, self.port)
        self.address = f"http://{place}/"
        if access.token is not None:
            self.address += f"?token={access.token}"
        self._threads = [
            threading.Thread(target=self._follow, name="dsx-watch-run", daemon=True),
            threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Let go of the port, and of whoever looks."""
        self._ends.set()
        self._server.is_ending = True
        with self._changed:
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()

    def _follow(self) -> None:
        """Read what is written, and wake whoever waits for it."""
        if self._against is not None:
            while _poll(self._against) and not self._ends.is_set():
                pass
        while not self._ends.is_set():
            has_more = _poll(self.run)
            if self._against is not None:
                _poll(self._against)
            if self.run.version != self._version:
                with self._changed:
                    self._version = self.run.version
                    self._changed.notify_all()
            if not has_more:
                self._ends.wait(_POLL_SECONDS)

    def _next_state(self, version: int) -> tuple[int, dict[str, Any]]:
        with self._changed:
            if self._version == version and not self._ends.is_set():
                self._changed.wait(self._sign_seconds)
            version = self._version
        return version, self._state({})

    def _state(self, fields: Mapping[str, str]) -> dict[str, Any]:
        found = state(self.run, time.time())
        if self._against is not None:
            found["against"] = self._against.folder.resolve().name
        return found

    def _chart(self, fields: dict[str, str]) -> dict[str, Any]:
        chart = BY_KEY.get(fields.get("key", ""))
        if chart is None:
            raise ValueError(f"key={fields.get('key')!r} must be one of {', '.join(BY_KEY)}")
        axis = next((axis for axis in AXES if axis == fields.get("axis", "step")), None)
        if axis is None:
            raise ValueError(f"axis={fields['axis']!r} must be one of {', '.join(AXES)}")
        first, end, last = (_number(fields, name) for name in ("from", "to", "last"))
        points = int(_number(fields, "points") or 600)
        with self.run.lock:
            clusters = [cluster for cluster in self.run.clusters if cluster.has_records]
            if axis not in axes_of(clusters):
                axis = "step"  # tokens are not counted (yet)
            other = [] if self._against is None else self._against.clusters
            levels = line_levels(self.run)
            view = View(axis, first, end, last, points)
            return chart_data(chart, clusters, view, other, levels)

    def _metrics(self) -> tuple[str, bytes]:
        """Return the figures of all clusters for Prometheus."""
        if self.run.replays is None:
            raise ModuleNotFoundError(
                "/metrics needs prometheus-client, which is not installed here: pip install "
                '"dsx-train[prometheus]", and start the page again'
            )
        with self.run.lock:
            return page_of(self.run.replays.shown(self.run.other_runs))

    def _lanes(self, fields: dict[str, str]) -> dict[str, Any]:
        wanted, seconds = _number(fields, "cluster"), _number(fields, "seconds")
        with self.run.lock:
            for cluster in self.run.clusters:
                has_any = cluster.num_syncs or any(cluster.open_transfers)
                if has_any and wanted in (None, cluster.cluster):
                    return lanes(cluster, seconds)
        return {"lanes": [], "span": [0, 1]}


def _poll(run: WatchedRun) -> bool:
    """Read what is new; what goes wrong is told on the page, and what is read goes on."""
    try:
        has_more = run.poll()
    except Exception as error:
        run.tell("all", f"the run's files could not all be read: {type(error).__name__}: {error}")
        return False
    run.tell("all", "")
    return has_more


def _meanings(fields: Mapping[str, str]) -> dict[str, dict[str, str]]:
    return MEANINGS


def _number(fields: dict[str, str], name: str) -> float | None:
    if not fields.get(name):
        return None
    try:
        value = float(fields[name])
    except ValueError:
        value = float("nan")
    if value != value or abs(value) == float("inf"):
        raise ValueError(f"{name}={fields[name][:40]!r} must be a number")
    return value


def has_screen() -> bool:
    """Whether a browser would open beside this terminal, and not in it."""
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def watch(
    run: WatchedRun,
    against: WatchedRun | None,
    place: tuple[str, int],
    opens_browser: bool,
    asks_for_token: bool,
    say: Callable[[str], None],
    what: str = "",
    alarms: Collection[str] = (),
) -> None:
    """Serve a run's page at a host's port until Ctrl-C; OSError says what cannot be had.

    `what` is watched, in words; by default the run's folder.
    """
    host, port = place
    page = Watch(run, host, port, against, asks_for_token, alarms=alarms, has_disk=not what)
    try:
        if not what and not run.folder.exists():
            say(f"no run at {run.folder} yet: the page waits for it")
        say(f"{what or run.folder} at {page.address}")
        if not is_loopback(host):
            say("whoever has this address can read the page, which is not encrypted")
        say("Ctrl-C ends it")
        if opens_browser and has_screen():
            webbrowser.open(page.address)
        while True:
            time.sleep(1)  # a signal that another thread has taken is seen then
    except KeyboardInterrupt:
        say("ended")
    finally:
        page.close()
