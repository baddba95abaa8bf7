"""How many messages a transfer is: each costs a small packet's headers and two latencies."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

import dsx
from dsx.comm.point_to_point import PointToPoint
from tests.comm.test_network_equals_in_process import adamw
from tests.distributed import run_distributed

METHODS: dict[str, dict[str, Any]] = {
    "dense": {},
    "codes": {"compression": {"type": "quantized", "wire": "int8"}},
    "factors": {
        "compression": {"type": "low_rank", "rank": 1, "min_saving": 1.0, "exclude": []},
    },
}


def messages_of_two_rounds(num_clusters: int) -> dict[str, list[int]]:
    """By method the sends of each of two rounds of the only fragment."""
    clusters = {"num_clusters": num_clusters, "deadline_seconds": 20}
    dsx.init_distributed({"dsx": {"preset": "diloco", "clusters": clusters}})
    counts: dict[str, list[int]] = {}
    for name, overrides in METHODS.items():
        model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Linear(48, 32))
        optimizer = adamw(model)
        config = {"preset": "diloco", "clusters": clusters, "schedule": {"interval": 2}}
        handle = dsx.attach(model, optimizer, config={"dsx": {**config, **overrides}})
        counts[name] = []
        for _ in range(2):
            with patch.object(
                PointToPoint, "send", autospec=True, side_effect=PointToPoint.send
            ) as send:
                for _ in range(2):
                    optimizer.zero_grad()
                    model(torch.ones(3, 32)).square().mean().backward()
                    optimizer.step()
            counts[name].append(send.call_count)
        handle.finish()
    return counts


def test_of_two_clusters() -> None:
    for counts in run_distributed(messages_of_two_rounds, 2, 2):
        assert counts == {
            "dense": [
                3,
                3,
            ],  # the handshake with the parity check's header, the vectors, the commit
            "codes": [3, 3],
            "factors": [10, 6],  # P to its owner, its mean, Q, its mean; twice at first
        }


def test_of_three_clusters() -> None:
    for counts in run_distributed(messages_of_two_rounds, 3, 3):
        assert counts["dense"] == [
            8,
            8,
        ]  # to each of two: handshake, slice, mean of the own, commit
        assert counts["codes"] == [6, 6]
