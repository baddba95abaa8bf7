"""A transport closes at once, whatever it waits for; its sockets are no child's."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from typing import Any

import pytest
import torch

from dsx.comm.sockets import let_go_in_child, opened_here
from dsx.compress.averaging import ExactMean
from dsx.core.transport import PeerLost, Submission
from tests.comm.test_handshake import transport
from tests.distributed import run_distributed


class Lines(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def close_under_way() -> dict[str, Any]:
    """Cluster 1 never launches; cluster 0 closes while it waits for it."""
    lines = Lines()
    logging.getLogger("dsx").addHandler(lines)
    line = transport(30.0)
    if line.seat.cluster_id == 1:
        began = time.perf_counter()
        try:
            line.gather("the end", None)()
            error = ""
        except PeerLost as lost:
            error = str(lost)
        return {"error": error, "seconds": time.perf_counter() - began, "lines": lines.lines}
    pending = line.submit(Submission(0, 7), ExactMean(line.seat).exchange(torch.ones(2)))
    began = time.perf_counter()
    line.close()
    seconds = time.perf_counter() - began
    return {"lines": lines.lines, "seconds": seconds, "done": pending.future.done()}


@pytest.mark.ci
def test_closing_does_not_wait_for_a_silent_peer() -> None:
    closed, other = run_distributed(close_under_way, 2)
    assert 1.0 <= closed["seconds"] < 10 and closed["done"]  # of 30; two on an idle machine
    assert closed["lines"] == [
        "closed, giving up what was under way: fragment 0 launched at step 7"
    ]
    assert "the end: cluster 0 closed its connection" in other["error"]
    assert other["seconds"] < 20  # of its 30


def test_a_forked_child_holds_no_connection() -> None:
    ports = set[int]()
    with opened_here(ports) as ours:
        server = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        foreign = socket.create_server(("127.0.0.1", 0))  # by another thread, meanwhile
        ports.add(server.getsockname()[1])
    with socket.socket(socket.AF_UNIX) as local, opened_here(ports) as none:
        local.fileno()
    assert len(ours) == 3 and len(none) == 0
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        kinds = [os.readlink(f"/proc/self/fd/{s.fileno()}") for s in (server, client, accepted)]
        kinds.append(os.readlink(f"/proc/self/fd/{foreign.fileno()}")[:7])
        os.write(writer, " ".join(kinds).encode())
        signal.pause()
        os._exit(0)
    try:
        assert os.read(reader, 1000).decode() == "/dev/null /dev/null /dev/null socket:"
        accepted.close()
        client.settimeout(5)
        assert client.recv(1) == b""  # the child does not keep it open
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    ours.shut_down()
    assert len(ours) == 0
    for one in (server, client, foreign):
        one.close()
    os.close(reader)
    os.close(writer)
    let_go_in_child()  # of nothing: it is known for ours no more
