"""A cluster's `/metrics` for Prometheus: a page that a thread of its own serves.

`metrics.prometheus` is HOST:PORT, and cluster m serves at PORT + m, wherever it runs: clusters of
one host have ports of their own, and those of several are found by the same rule. The page has the
figures (figures.py) and nothing else, in a registry of its own; it has no authentication, so the
host that is written there says who reaches it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import util
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from dsx.telemetry.few_callers import FewCallers
from dsx.telemetry.figures import FIGURES, Figures

if TYPE_CHECKING:  # an extra
    from prometheus_client.metrics_core import Metric

_MOST_CALLERS = 16  # at once; whoever else calls is cut off
_IDLE_SECONDS = 10.0  # that a connection may say nothing


class Page:
    """One cluster's page, from now until `close`.

    Raises ModuleNotFoundError without the extra, OSError where the port cannot be had.
    """

    def __init__(self, host: str, first_port: int, figures: Figures) -> None:
        port = first_port + figures.cluster
        application = _application(figures)
        try:
            self._server = _Server(host, port, application)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise OSError(
                f"dsx.metrics.prometheus={host}:{first_port}: cluster {figures.cluster} serves at "
                f"port {port} there, its number further on, and cannot: {why}; end what "
                "listens there (another run, or another engine of this process that is not "
                "closed), or give an address of this host and a port that is free"
            ) from error
        self._process = os.getpid()
        util.register_after_fork(self._server, _Server.let_go)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="dsx-prometheus", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Let go of the port."""
        if os.getpid() == self._process and self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


class _Server(FewCallers, WSGIServer):
    """Answers each caller on a thread."""

    def __init__(self, host: str, port: int, application: Callable[..., Any]) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        self.places = threading.Semaphore(_MOST_CALLERS)
        super().__init__((found[0][4][0], port), _Handler)  # type: ignore[arg-type]
        self.set_app(application)

    def server_bind(self) -> None:
        """Bind, without a look-up of the host's own name: that may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def let_go(self) -> None:
        """Leave the port to the parent; in a process that it has forked."""
        self.socket.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a caller that has gone."""


class _Handler(WSGIRequestHandler):
    """Logs no request, and waits for none for ever."""

    timeout = _IDLE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class _Collector:
    """What is asked at each visit, of one cluster or several."""

    def __init__(self, *figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Yield the figures that are known."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        read = [(str(of.cluster), of.read()) for of in self._figures]
        for figure in FIGURES:
            kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
            family = kind(figure.name, figure.meaning, labels=["cluster", *figure.labels])
            for cluster, found in read:
                for labels, value in found[figure.name].items():
                    family.add_metric([cluster, *labels], value)
            if family.samples:
                yield family


def page_of(figures: Sequence[Figures]) -> tuple[str, bytes]:
    """Return the kind and the text of a page of several clusters.

    Raises ModuleNotFoundError without the extra.
    """
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(*figures))  # type: ignore[arg-type]
    return CONTENT_TYPE_LATEST, generate_latest(registry)


def _application(figures: Figures) -> Callable[..., Any]:
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "dsx.metrics.prometheus is set but prometheus-client is not installed: pip install "
            '"dsx-train[prometheus]"', name=error.name,
        ) from error  # fmt: skip
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(figures))  # type: ignore[arg-type]
    return make_wsgi_app(registry)
