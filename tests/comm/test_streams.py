"""Transfers over several connections: the same bits, the same bytes, the same errors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import dsx
from dsx.comm.gloo import GlooTransport
from dsx.comm.in_process import InProcessHub
from dsx.compress.averaging import ExactMean
from dsx.compress.base import Channel, Compressor, Dense, Launch
from dsx.compress.low_rank import LowRank
from dsx.compress.quantized import Quantized
from dsx.core.membership import Membership, Seat
from dsx.core.transport import Submission
from dsx.core.types import Fragment, Slot, Stage
from tests.comm.threads import over_gloo
from tests.distributed import run_distributed
from tests.tiny import TinyNet, mean_loss

ROUNDS = 2
CODECS: dict[str, Compressor] = {
    "dense": Dense(),
    "int4": Quantized(error_feedback="fp32", kernels="eager"),
    "low_rank": LowRank(rank=48, kernels="eager"),
}
SHAPES = [(512, 384), (384, 520), (77,)]  # eight pieces in fp32 and int4, three of low rank


def fragment() -> Fragment:
    slots: list[Slot] = []
    for index, shape in enumerate(SHAPES):
        slots.append(Slot(f"w{index}", shape, sum(slot.numel for slot in slots)))
    return Fragment(0, 0, tuple(slots))


def values(cluster: int, round: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * round + cluster)
    return torch.randn(fragment().numel, generator=generator)


def submit(transport: Any, channel: Channel, round: int) -> Any:
    exchange = channel.exchange(values(transport.seat.cluster_id, round), Launch(round))
    return transport.submit(Submission(0, round), exchange)


def in_process(codec: Compressor, num_clusters: int) -> list[tuple[torch.Tensor, int]]:
    """Return every cluster's mean of every round, and the bytes it sent."""
    transports = InProcessHub(Membership.of(num_clusters)).transports()
    channels = [codec.open(fragment(), Seat.of(m, num_clusters), 0) for m in range(num_clusters)]
    found: list[tuple[torch.Tensor, int]] = []
    for round in range(1, ROUNDS + 1):
        pairs = zip(transports, channels, strict=True)
        under_way = [submit(transport, channel, round) for transport, channel in pairs]
        found += [(pending.wait().clone(), pending.bytes_sent) for pending in under_way]
    return found


def in_threads(
    codec: Compressor, num_clusters: int, streams: int
) -> list[tuple[torch.Tensor, int]]:
    """The same with a thread per cluster, each with connections of its own."""

    def cluster(transport: GlooTransport) -> list[tuple[torch.Tensor, int]]:
        channel = codec.open(fragment(), transport.seat, 0)
        found: list[tuple[torch.Tensor, int]] = []
        for round in range(1, ROUNDS + 1):
            pending = submit(transport, channel, round)
            found.append((pending.wait().clone(), pending.bytes_sent))
        return found

    by_cluster = over_gloo(num_clusters, cluster, streams=streams)
    return [by_cluster[m][round] for round in range(ROUNDS) for m in range(num_clusters)]


@pytest.mark.parametrize("num_clusters", [2, 4])
@pytest.mark.parametrize("name", CODECS)
def test_any_number_of_streams_gives_the_bits_of_one_process(name: str, num_clusters: int) -> None:
    expected = in_process(CODECS[name], num_clusters)
    for streams in (1, 2, 3, 8) if num_clusters == 2 else (1, 3):
        found = in_threads(CODECS[name], num_clusters, streams)
        for (mean, num_bytes), (right, right_bytes) in zip(found, expected, strict=True):
            assert torch.equal(mean, right), streams
            assert num_bytes == right_bytes, streams


def config(streams: int) -> dict[str, Any]:
    clusters = {"num_clusters": 2, "deadline_seconds": 20}
    method = {"preset": "diloco_delayed", "schedule": {"interval": 2}}
    return {"dsx": {**method, "clusters": clusters, "link": {"streams": streams}}}


class Run:
    """A run that can be saved and gone on with."""

    def __init__(self, streams: int) -> None:
        self.model = TinyNet()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.handle = dsx.attach(self.model, self.optimizer, config=config(streams))

    def train(self, until: int) -> None:
        for step in range(self.handle.step + 1, until + 1):
            self.optimizer.zero_grad()
            mean_loss(self.model, self.handle.cluster_id, step).backward()
            self.optimizer.step()

    def end(self) -> list[Any]:
        self.handle.finish()
        self.handle.close()
        return [p.detach().numpy() for p in self.model.parameters()]


def resume(directory: Path) -> tuple[list[Any], list[Any]]:
    """Save under 2 streams with a transfer in flight, go on under 2 and under 3."""
    run = Run(2)
    run.train(4)
    directory.mkdir()
    run.handle.save(directory)
    inner = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    run.train(7)
    resumed = Run(3)
    resumed.model.load_state_dict(inner[0])
    resumed.optimizer.load_state_dict(inner[1])
    resumed.handle.load(directory)
    resumed.train(7)
    return run.end(), resumed.end()


def resume_then_differ_then_lose_a_peer(directory: str) -> tuple[Any, str, str]:
    world = dsx.init_distributed(config(1))
    uninterrupted, resumed = resume(Path(directory) / str(world.cluster_id))
    is_equal = all((a == b).all() for a, b in zip(uninterrupted, resumed, strict=True))
    with pytest.raises(ValueError) as refused:
        Run(2 + world.cluster_id)
    transport = world.connect([0], Stage(), streams=3)
    exchange = ExactMean(Seat.of(world.cluster_id, 2)).exchange(torch.ones(200_000))
    if world.cluster_id == 1:
        return is_equal, str(refused.value), ""  # the process ends before the transfer
    with pytest.raises(dsx.PeerLost) as lost:
        transport.submit(Submission(0, 7), exchange).wait()
    return is_equal, str(refused.value), str(lost.value)


@pytest.mark.ci
def test_resumes_under_another_number_but_clusters_have_one(tmp_path: Path) -> None:
    results = run_distributed(
        resume_then_differ_then_lose_a_peer, 2, str(tmp_path), ends_together=False
    )
    for is_equal, refused, _ in results:
        assert is_equal
        assert "at dsx.link.streams: cluster 0 has 2, cluster 1 has 3" in refused
    assert results[0][2].startswith("fragment 0 launched at step 7: cluster 1 closed its connectio")
