"""Small values of all clusters, told over their own connections, or in one process."""

from __future__ import annotations

from typing import Any

import pytest

from dsx.comm.in_process import InProcessHub
from dsx.core.membership import Membership
from dsx.core.transport import PeerLost
from tests.comm.test_handshake import transport
from tests.distributed import run_distributed


def tell_each_other() -> list[Any]:
    line = transport(2.0)
    cluster = line.seat.cluster_id
    told = line.gather("sizes", {"of": cluster, "text": "x" * 70_000 * cluster})()
    values: list[Any] = [[value["of"] for value in told], len(told[1]["text"])]
    names = ["end of training", "gather()"]
    try:
        line.gather(names[cluster], 1)()
    except PeerLost as error:
        values.append(str(error))
    if cluster == 0:
        try:
            line.gather("alone", 1)()
        except PeerLost as error:
            values.append(str(error))
    return values


def test_small_values_are_told_over_the_handshakes_connections() -> None:
    first, second = run_distributed(tell_each_other, 2)
    assert first[:2] == second[:2] == [[0, 1], 70_000]
    assert first[2].startswith("end of training, but cluster 1 is at gather(): the clusters have")
    assert second[2].startswith("gather(), but cluster 0 is at end of training")
    assert "alone: cluster 1 did not answer within 2 s (clusters.deadline_seconds)" in first[3]


def test_clusters_of_one_process_tell_each_other_the_same() -> None:
    first, second = InProcessHub(Membership.of(2)).transports()
    for number in range(2):
        waits = [line.gather("sizes", {"of": number + m}) for m, line in enumerate((first, second))]
        assert [wait() for wait in waits] == [[{"of": number}, {"of": number + 1}]] * 2
    wait = first.gather("sizes", 1)
    with pytest.raises(PeerLost, match="sizes: cluster 1 of this process has not told its value"):
        wait()
    second.gather("others", 1)
    with pytest.raises(PeerLost, match="sizes, but cluster 1 is at others: the clusters have lost"):
        wait()
    assert InProcessHub(Membership.of(1)).transports()[0].gather("sizes", 3)() == [3]
