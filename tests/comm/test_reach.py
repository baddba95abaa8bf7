"""An address that does not lead to a rank is named before gloo tries it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from dsx.comm import reach
from dsx.comm.interfaces import addresses, interface_of
from dsx.comm.reach import Listening, require_reach, why_not
from dsx.core.membership import Membership, Seat
from dsx.core.transport import PeerLost


def seats(num_clusters: int) -> list[Seat]:
    return [Seat(Membership.of(num_clusters), id) for id in range(num_clusters)]


def meet(
    told: Callable[[int, reach.Place], reach.Place], num_clusters: int, unknown: Sequence[int] = ()
) -> list[str]:  # what each cluster is told, "" where all is well
    store, said = dist.HashStore(), [""] * num_clusters

    class Told:
        """The store as one cluster sees it, that may tell of another place than it listens at."""

        def __init__(self, own: int) -> None:
            self.own = own

        def set(self, key: str, value: str) -> None:
            if key.startswith("place/") and value != "null":
                place = reach.Place(**json.loads(value))
                value = json.dumps(vars(told(self.own, place)))
            store.set(key, value)

        def wait(self, keys: list[str], deadline: timedelta) -> None:
            store.wait(keys, deadline)

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return store.multi_get(keys)

    def run(seat: Seat) -> None:
        try:
            own: Any = Told(seat.position)
            address = "" if seat.position in unknown else "127.0.0.1"
            require_reach(own, seat, address, None, timedelta(seconds=20))
        except PeerLost as error:
            said[seat.position] = str(error)

    threads = [threading.Thread(target=run, args=(seat,)) for seat in seats(num_clusters)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return said


def test_all_that_are_reached_are_no_trouble() -> None:
    assert meet(lambda own, place: place, 3) == ["", "", ""]


def test_who_does_not_know_where_it_listens_is_not_called_and_calls_the_others() -> None:
    """Where there is no /proc, or several were opened at once."""
    assert meet(lambda own, place: place, 3, unknown=[1]) == ["", "", ""]
    assert meet(lambda own, place: place, 2, unknown=[0, 1]) == ["", ""]


def lose(*lost: int) -> Callable[[int, reach.Place], reach.Place]:
    """Have these clusters say a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    return lambda own, place: replace(place, port=port) if own in lost else place


def test_two_of_which_neither_reaches_the_other_are_named_to_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reach, "_CALL_SECONDS", 0.3)
    said = meet(lose(0, 1), 3)
    assert len(set(said)) == 1 and said[0].count("--dsx-interface") == 2
    where = "127.0.0.1 (lo, that of the host's name)"
    assert said[0].startswith(f"cluster 0 listens at {where} on host")
    assert "and cluster 1 on host" in said[0] and "Connection refused" in said[0]
    assert "cluster 2 listens" not in said[0]


def test_one_that_reaches_the_others_and_is_not_reached_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """gloo needs one way only, and takes it by the addresses: it may well connect."""
    monkeypatch.setattr(reach, "_CALL_SECONDS", 0.3)
    assert meet(lose(1), 3) == ["", "", ""]
    assert caplog.text.count("cluster 1 listens at") == 2  # to clusters 0 and 2
    assert "it reaches this one: gloo may connect from there" in caplog.text


def test_another_process_at_the_same_private_address_is_seen() -> None:
    """Two sites may have the same private network: the address leads to a host of one's own."""
    with Listening("127.0.0.1", None) as other:
        said = meet(lambda own, place: replace(place, port=other.place.port), 2)
    assert "another process answers there" in said[0] and said[0] == said[1]


def test_whoever_listens_and_says_nothing_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reach, "_CALL_SECONDS", 0.1)
    with Listening("127.0.0.1", "lo") as own, socket.create_server(("127.0.0.1", 0)) as silent:
        place = replace(own.place, port=silent.getsockname()[1])
        assert why_not(place) == "no answer in 0.1 s"
        assert why_not(own.place) is None


def test_interfaces_have_their_addresses() -> None:
    assert "127.0.0.1" in addresses()["lo"]
    assert interface_of("127.0.0.1") == "lo" and interface_of("203.0.113.9") == ""
