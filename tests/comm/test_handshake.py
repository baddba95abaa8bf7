"""The launch handshake: where clusters wait for each other, apart from a transfer's seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.comm.gloo import GlooTransport
from dsx.comm.gloo_groups import connect_gloo, open_device
from dsx.compress.averaging import ExactMean
from dsx.core.exchange import HEADER, ExchangeRound, to_all
from dsx.core.membership import Seat
from dsx.core.transport import PeerLost, Submission
from tests.distributed import run_distributed

LATE = 0.6  # seconds


def transport(deadline_seconds: float) -> GlooTransport:
    """Of one fragment, between the two processes."""
    cluster = int(os.environ["RANK"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store, seat = dist.TCPStore(address, port, 2, is_master=cluster == 0), Seat.of(cluster, 2)
    device = open_device("lo")

    def connect(what: str, count: int) -> list[Any]:
        named = dist.PrefixStore(what, store)
        return connect_gloo(named, seat, timedelta(seconds=20), device, count)

    return GlooTransport([0], connect, seat, deadline_seconds, ports=device.ports)


def with_header(seat: Seat, x: Tensor, theirs: Tensor) -> Generator[ExchangeRound, None, Tensor]:
    header = torch.full((3,), 10 + seat.cluster_id)
    yield to_all([header], [[theirs], [theirs]], HEADER)
    return (yield from ExactMean(seat).exchange(x))


def meet_late() -> tuple[float, float, list[int], list[float], int]:
    line = transport(20.0)
    if line.seat.cluster_id == 1:
        time.sleep(LATE)
    seat, theirs = Seat.of(line.seat.cluster_id, 2), torch.zeros(3, dtype=torch.int64)
    began = time.perf_counter()
    pending = line.submit(
        Submission(0, 1), with_header(seat, torch.full((2,), float(line.seat.cluster_id)), theirs)
    )
    mean = pending.wait().tolist()
    waited = time.perf_counter() - began
    line.close()
    return waited, pending.seconds, theirs.tolist(), mean, pending.bytes_sent


def test_the_wait_for_others_is_not_in_a_transfers_seconds() -> None:
    first, second = run_distributed(meet_late, 2)
    assert first[0] > LATE / 2 > first[1] > 0
    assert second[1] < LATE / 2
    assert [first[2], second[2]] == [[11] * 3, [10] * 3]  # each other's header
    assert first[3] == second[3] == [0.5, 0.5]
    assert first[4] == second[4] == 48 + 8


def tell() -> tuple[list[dict[int, bytes]], list[int]]:
    """Cluster 1 tells something beside the second and the third transfer, cluster 0 the third."""
    line = transport(20.0)
    cluster = line.seat.cluster_id
    told: list[dict[int, bytes]] = []
    sent: list[int] = []
    for step, notes in enumerate([(b"", b""), (b"", b"one" * 99), (b"an", b"other"), (b"", b"")]):
        what = Submission(0, step, notes=notes[cluster])
        pending = line.submit(what, ExactMean(line.seat).exchange(torch.ones(2)))
        assert pending.wait().tolist() == [1.0, 1.0]
        told.append(dict(pending.notes))
        sent.append(pending.bytes_sent - 48 - 8)
    line.close()
    return told, sent


def test_what_is_told_beside_a_transfer_comes_with_it() -> None:
    first, second = run_distributed(tell, 2)
    assert first[0] == second[0] == [{}, {1: b"one" * 99}, {0: b"an", 1: b"other"}, {}]
    assert first[1] == [0, 0, 2, 0] and second[1] == [0, 297, 5, 0]


def fail_first() -> str:
    line = transport(1.0)
    if line.seat.cluster_id == 1:

        def failing() -> Generator[ExchangeRound, None, Tensor]:
            raise OSError("no such value")
            yield

        try:
            line.submit(Submission(0, 7), failing()).wait()
        except OSError as error:
            time.sleep(1.5)  # with its connections open
            return str(error)
    try:
        seat, header = Seat.of(line.seat.cluster_id, 2), torch.zeros(3, dtype=torch.int64)
        line.submit(Submission(0, 7), with_header(seat, torch.ones(2), header)).wait()
    except PeerLost as error:
        return str(error)
    return ""


def test_one_that_fails_before_its_handshake_is_missed_by_name() -> None:
    lost, failed = run_distributed(fail_first, 2)
    assert failed == "no such value"
    assert "fragment 0 launched at step 7: cluster 1 did not answer within 1 s" in lost
