"""Plain PyTorch over several ranks per cluster: equal to one process per cluster, sent once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsx.core.exchange import HEADER_BYTES
from dsx.engines.data_parallel import bare_parameters
from dsx.plan.traffic import Traffic, loads_of
from tests.distributed import run_distributed
from tests.engines.resumes import Net
from tests.engines.torch_ranks import (
    CLUSTERS,
    RANKS,
    Kind,
    Trained,
    change_placement,
    method_of,
    reference,
    train,
)

CODED = ("int4", "low rank")  # groups and factors end where shards do
MUON = "muon" if hasattr(torch.optim, "Muon") else "adamw"
COPIES = [
    Kind("ddp", "streaming", MUON),
    Kind("ddp", "co2", "codes"),
    Kind("ddp", "measured"),
    Kind("ddp", "low rank"),
    Kind("compiled ddp", "int4"),
    Kind("ddp of compiled", "diloco"),
    Kind("ddp compiled in place", "layerwise"),
]


def check(kinds: list[Kind], base: Path, num_ranks: int = RANKS) -> None:
    """Every kind trains as in one process, resumes bit for bit, and sends each element once.

    `num_ranks` are those of each cluster.
    """
    ranks = run_distributed(train, num_ranks * CLUSTERS, kinds, str(base), timeout_seconds=400)
    for index, kind in enumerate(kinds):
        require_equal(kind, [rank[index] for rank in ranks])
        require_sent_once(kind, [rank[index][0] for rank in ranks])


def require_equal(kind: Kind, ranks: list[tuple[Trained, Trained]]) -> None:
    num_ranks = len(ranks) // CLUSTERS
    run = reference(kind.method, kind.optimizers, num_ranks)
    with run.averaged() as model:
        average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for rank, (whole, resumed) in enumerate(ranks):
        first = ranks[rank // num_ranks * num_ranks][0]
        for name, value in run.parameters()[rank // num_ranks].items():
            is_timed = kind.method == "measured"
            assert is_timed or (whole.weights[name] == resumed.weights[name]).all(), (kind, name)
            assert (whole.weights[name] == first.weights[name]).all(), (kind, name)
            assert (whole.average[name] == ranks[0][0].average[name]).all(), (kind, name)
            if kind.method in CODED or is_timed or kind in IN_BF16:
                continue
            for ours, theirs in (
                (whole.weights[name], value),
                (whole.average[name], average[name]),
            ):
                said = f"{kind}: {name}"
                torch.testing.assert_close(
                    torch.from_numpy(ours), theirs, rtol=0, atol=2e-6, msg=lambda m, s=said: s + m
                )


def require_sent_once(kind: Kind, ranks: list[Trained]) -> None:
    """The ranks of a cluster hold each element once, and send what the planner says."""
    method = method_of(kind.method)
    numel = sum(p.numel() for p in Net(0).parameters())
    for cluster in range(CLUSTERS):
        num_ranks = len(ranks) // CLUSTERS
        own = ranks[cluster * num_ranks : (cluster + 1) * num_ranks]
        sizes = [sum(fragment.numel for fragment in rank.fragments) for rank in own]
        assert sum(sizes) == numel
        assert max(sizes) - min(sizes) < 0.1 * numel
        traffic = Traffic(method, loads_of([rank.wire for rank in own]), CLUSTERS)
        expected = sum(f.numel > 0 for r in own for f in r.wire) * HEADER_BYTES  # at the end
        for fragment, launches in enumerate(own[0].launches):
            rounds = range(1, launches + 1)
            expected += sum(traffic.sent_in(fragment, number)[cluster] for number in rounds)
        assert sum(rank.totals.bytes_sent for rank in own) == expected, kind


@pytest.mark.ci
def test_copies_under_ddp(tmp_path: Path) -> None:
    check(COPIES, tmp_path)


def test_names_are_the_models_own() -> None:
    """Whatever wraps it, so that a checkpoint goes on under another wrapper."""
    net = Net(0)
    bare = {id(p): name for name, p in net.named_parameters()}
    net.layers[0] = torch.compile(net.layers[0], backend="eager")
    net.compile(backend="eager")
    found = bare_parameters(torch.compile(net, backend="eager"))
    assert {id(p): name for name, p in found.items()} == bare


SHARDS = [
    Kind("fsdp", "streaming", MUON),
    Kind("fsdp", "co2"),
    Kind("fsdp", "measured"),
    Kind("fsdp", "low rank"),
    Kind("fsdp bf16", "int4"),
    Kind("fsdp compiled blocks", "diloco"),
    Kind("compiled fsdp", "diloco"),
]
IN_BF16 = [Kind("fsdp", "streaming", "muon"), Kind("fsdp bf16", "int4")]  # Muon's own, of shards


@pytest.mark.ci
def test_shards_of_fsdp2(tmp_path: Path) -> None:
    check(SHARDS, tmp_path)


@pytest.mark.ci
def test_replicas_of_shards(tmp_path: Path) -> None:
    """Two shards of two copies each in every cluster: each rank serves half of its shard."""
    check([Kind("hsdp", "diloco"), Kind("hsdp", "low rank")], tmp_path, 4)


@pytest.mark.ci
def test_shards_go_on_as_copies_and_read_what_is_written(tmp_path: Path) -> None:
    ranks = run_distributed(change_placement, RANKS * CLUSTERS, str(tmp_path))
    for said, whole, other in ranks:
        assert said["gathered"]
        for name, value in whole.weights.items():
            torch.testing.assert_close(
                torch.from_numpy(other.weights[name]), torch.from_numpy(value), rtol=0, atol=2e-6
            )
        assert "launches a layer inside the backward, of which fully_shard tells" in said["layers"]
        assert said["columns"].startswith("parameter layers.0.weight lies placed as (Shard(dim=1)")
        assert said["tensor parallel"].startswith("parameter layers.0.weight lies placed as (")
        alone = "parameter gain lies on every rank for itself, not shard"
        assert not said["ignored"] or said["ignored"].startswith(alone)
        assert said["apart"].startswith("the model is spread over 1 of this cluster's 2 ranks")
        assert said["mixed"].startswith("parameter layers.0.weight is placed as Shard over ")
        assert "and others as Replicate over" in said["mixed"]
        assert said["half"].startswith("parameter gain is torch.bfloat16: the outer step needs fp3")
        assert said["fsdp 1"].startswith("FullyShardedDataParallel (FSDP1) is not served with")
