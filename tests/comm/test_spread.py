"""What one cluster gives to others: all of it arrives, and a wait that fails says what for."""

from __future__ import annotations

import os
import re
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dsx.comm import farewell, spread
from dsx.comm.gloo import FragmentGroups, GlooTransport
from dsx.comm.gloo_groups import connect_gloo, open_device
from dsx.comm.spread import LEAST_PIECE_BYTES, MOST_PIECE_BYTES, Way, cut
from dsx.core.membership import Seat
from dsx.core.transport import PeerLost
from tests.comm.detour import Detour
from tests.comm.threads import over_gloo
from tests.distributed import run_distributed


def values(cluster: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(cluster))


@pytest.mark.parametrize("numel", [1, 65_536, 65_537, 4_200_001, 300_000_000])
def test_pieces_are_cut_by_the_length_alone_and_have_two_limits(numel: int) -> None:
    cuts = cut(numel)
    assert cuts[0][0] == 0 and cuts[-1][1] == numel
    assert all(a[1] == b[0] for a, b in zip(cuts, cuts[1:], strict=False))
    sizes = {4 * (stop - start) for start, stop in cuts[:-1]}
    assert all(LEAST_PIECE_BYTES <= size <= MOST_PIECE_BYTES for size in sizes)
    assert cut(0) == []


@pytest.mark.parametrize(
    ("num_clusters", "chain", "numel", "streams"),
    [
        (2, (0, 1), 100_001, 1),
        (3, (0, 1, 2), 1_200_001, 3),  # more pieces than are under way at a time
        (3, (1, 0), 70_001, 2),
        (4, (2, 0, 3), 1, 1),
    ],
)
def test_all_in_the_chain_have_what_the_first_has(
    num_clusters: int, chain: tuple[int, ...], numel: int, streams: int
) -> None:
    moved: list[list[int]] = [[] for _ in range(num_clusters)]

    def take(transport: GlooTransport) -> tuple[torch.Tensor, int]:
        own = transport.seat.position
        tensor = values(own, numel)
        return tensor, transport.spread(0, tensor, chain, moved[own].append)

    found = over_gloo(num_clusters, take, streams=streams)
    for m, (tensor, sent) in enumerate(found):
        assert torch.equal(tensor, values(chain[0] if m in chain else m, numel))
        assert sent == (4 * numel if m in chain[:-1] else 0)
        assert sum(moved[m]) == (4 * numel if m in chain else 0)
        signs = 0 if m not in chain else 2 if m in chain[1:-1] else 1  # whoever passes on gives two
        assert len(moved[m]) == signs * len(cut(numel))


@pytest.mark.parametrize("is_gone", [False, True], ids=["silent", "gone"])
def test_a_peer_that_takes_nothing_is_named_with_fragment_piece_and_bytes(
    is_gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(farewell, "_GRACE_SECONDS", 0.2)
    waited = threading.Event()

    def give(transport: GlooTransport) -> tuple[str, float]:
        if transport.seat.position == 1:
            if not is_gone:
                assert waited.wait(20)
            return "", 0.0
        began = time.monotonic()
        try:
            with pytest.raises(PeerLost) as lost:
                transport.spread(0, values(0, 1_000_000), (0, 1), lambda moved: None)
        finally:
            waited.set()
        return str(lost.value), time.monotonic() - began

    (message, seconds), _ = over_gloo(2, give, deadline_seconds=0.5)
    assert re.match(
        r"fragment 0 of cluster 0: piece 1 of 16 from cluster 0 to cluster 1, 0 B of 4 MB so far: ",
        message,
    ), message
    if is_gone:
        assert "cluster 1 closed its connection" in message
    else:
        assert "nothing has moved for 0.5 s (clusters.deadline_seconds)" in message
        assert 0.5 <= seconds < 5


def test_a_deadline_is_of_no_movement_and_not_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A giver that takes long over each piece, and in all longer than the deadline."""
    stage = spread._Pieces.stage
    pause = threading.Event()

    def slow(pieces: spread._Pieces, number: int) -> None:
        pause.wait(0.1)
        stage(pieces, number)

    monkeypatch.setattr(spread._Pieces, "stage", slow)

    def take(transport: GlooTransport) -> tuple[torch.Tensor, float]:
        tensor, began = values(transport.seat.position, 524_288), time.monotonic()
        transport.spread(0, tensor, (0, 1), lambda moved: None)
        return tensor, time.monotonic() - began

    for tensor, seconds in over_gloo(2, take, deadline_seconds=0.5):
        assert torch.equal(tensor, values(0, 524_288))  # eight pieces
        assert seconds > 0.5


def seconds_on_a_slow_line(numel: int, bytes_per_second: float, deadline: float) -> float:
    cluster = int(os.environ["RANK"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, 2, is_master=cluster == 0)
    detour, seat = Detour(store, cluster, 0.0, bytes_per_second), Seat.of(cluster, 2)
    try:
        groups = connect_gloo(detour, seat, timedelta(seconds=20), open_device("lo"))
        line = FragmentGroups(groups, seat, deadline)
        tensor, began = values(cluster, numel), time.monotonic()
        line.spread(tensor, "fragment 0", Way((0, 1), lambda moved: None))
        assert torch.equal(tensor, values(0, numel))
        seconds = time.monotonic() - began
        taken = dist.PrefixStore("taken", store)
        taken.set(str(cluster), "")
        taken.wait(["0", "1"])
        if cluster == 0:  # whose store ends with it
            taken.wait(["read"])
        else:
            taken.set("read", "")
        return seconds
    finally:
        detour.close()


@pytest.mark.ci
def test_a_slow_line_that_moves_does_not_meet_the_deadline() -> None:
    seconds = run_distributed(seconds_on_a_slow_line, 2, 1_000_000, 1e6, 1.5)
    assert max(seconds) > 3
