"""Sequence parallelism, experts, AutoTP and hpZ: against plain torch, plain DeepSpeed, a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dsx.engines.export import ExportOptions, export_checkpoint
from tests.distributed import run_distributed
from tests.engines.deepspeed_ranks import (
    ALONE,
    Kind,
    initialize,
    initialize_plain,
    readers,
    reference,
    take_step,
    whole_weights,
)
from tests.engines.engines import max_bit16_difference, quiet
from tests.engines.resumes import differences, inner_snapshot, snapshot
from tests.installed import needs
from tests.tiny import H

pytestmark = needs("deepspeed")

STOP, NUM_STEPS = 7, 10  # with a transfer under way; one is applied at every other step
HPZ: dict[str, Any] = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 10}
FEW = [Kind("experts", 1)]
MORE = [
    Kind("sequence", 1),
    Kind("sequence", 3, precision="bf16"),
    Kind("experts", 0),
    Kind("experts", 2, precision="bf16"),
    Kind("tensor", 1),
    Kind("tensor", 3),
    Kind("tensor", 0, precision="bf16"),
    Kind("data", 3, zero=HPZ),  # last: DeepSpeed keeps its groups in the process
]
FURTHER = [
    Kind("sequence", 0),
    Kind("sequence", 2, precision="bf16"),
    Kind("sequence", 3),
    Kind("experts", 2),
    Kind("experts", 1, precision="bf16"),
    Kind("experts", 0, precision="bf16"),
    Kind("tensor", 0),
    Kind("tensor", 2),
    Kind("tensor", 1, precision="bf16"),
    Kind("data", 3, precision="bf16", zero=HPZ),
]
OF_METHODS = [Kind("sequence", 1), Kind("experts", 1), Kind("tensor", 1)]
LOW_RANK: dict[str, Any] = {
    "preset": "diloco_delayed",
    "schedule": {"interval": H},
    "compression": {"type": "low_rank", "rank": 2, "full_round_every": 3},
}
NORMS: dict[str, Any] = {"preset": "co2", "schedule": {"interval": H}}


def name_of(kind: Kind) -> str:
    return f"{kind.divides}-zero{kind.stage}-{kind.precision}"


def end(engine: Any) -> None:
    engine.dsx.close()
    engine.destroy()


def train_and_resume(kind: Kind, base: str, **block: Any) -> dict[str, Any]:
    """Train past a save, and from it in a new engine; return what differs, and what is held."""
    engine = initialize(kind, **block)
    cluster = engine.dsx.cluster_id
    found: dict[str, Any] = {"cluster": cluster}
    for step in range(1, NUM_STEPS + 1):
        take_step(engine, kind, step, cluster)
        if step == STOP:
            saved = snapshot(engine)  # waits for the means, or they would be made again
            engine.save_checkpoint(base, tag="at")
    found["syncs"] = engine.dsx.totals.syncs
    found["weights"] = whole_weights(engine, kind)
    found["bit16"] = max_bit16_difference(engine)
    ended = snapshot(engine)
    engine.dsx.finish()
    found["bit16"] = max(found["bit16"], max_bit16_difference(engine))
    with engine.dsx.averaged():
        found["averaged"] = whole_weights(engine, kind)
    found["anchors"] = [anchor.clone() for anchor in engine.dsx.loop.state.anchor]
    engine.save_checkpoint(base, tag="end")
    engine.dsx.gather("all clusters have saved")
    found["exported"] = exported(base, cluster)
    if kind.divides == "tensor":  # the last thing: DeepSpeed takes the weights out of its buffers
        found["finished"] = whole_weights(engine, kind)
        found["joined"] = engine._consolidated_16bit_state_dict()
    layout = engine.dsx.loop.adapter.fragments
    found["layout"] = [(s.name, s.start, s.numel) for f in layout for s in f.layout]
    end(engine)
    engine = initialize(kind, **block)
    engine.load_checkpoint(base, tag="at")
    found["loaded"] = differences(snapshot(engine), saved)
    for step in range(STOP + 1, NUM_STEPS + 1):
        take_step(engine, kind, step, cluster)
    found["resumed"] = differences(snapshot(engine), ended)
    end(engine)
    return found


def exported(base: str, cluster: int) -> Any:
    """Return what `dsx export` makes of the checkpoint, or why it does not; on one rank."""
    if cluster or torch.distributed.get_rank():
        return None
    folder = Path(base) / "exported"
    try:
        export_checkpoint(ExportOptions(Path(base), folder, "safetensors", "end", "fp32", 1.0), str)
    except ValueError as error:
        return str(error)
    return load_file(next(folder.glob("*.safetensors")))


def train_all(kinds: list[Kind], base: str) -> list[dict[str, Any]]:
    quiet()
    found = []
    for number, kind in enumerate(kinds):
        one = train_and_resume(kind, f"{base}/{number}")
        one["expected"] = reference(kind, NUM_STEPS, readers(kind)[1])[one["cluster"]]
        found.append(one)
    return found


def assert_trained(kind: Kind, ranks: list[dict[str, Any]]) -> None:
    """Each rank against plain torch; shards are whole, clusters have the same outer state."""
    most = 1e-6 if kind.precision == "fp32" else 0.1  # Adam of small gradients in bf16
    worst = 0.0
    for rank in ranks:
        assert rank["loaded"] == [] and rank["resumed"] == [] and rank["bit16"] == 0.0
        assert rank["weights"].keys() == rank["expected"].keys()
        assert rank["syncs"] > 2
        for name, value in rank["expected"].items():
            worst = max(worst, (rank["weights"][name] - value).abs().max().item())
    print(f"{name_of(kind)}: {worst:.1e}")
    assert worst <= most
    assert_clusters_agree(ranks)
    assert_exported(kind, ranks[0])
    if kind.divides == "tensor":  # as the message of `dsx export` says
        for name, value in ranks[0]["finished"].items():
            assert torch.equal(ranks[0]["joined"][name].float(), value), name
    held: dict[str, int] = {}
    for rank in ranks[: len(ranks) // 2]:
        for name, _, numel in rank["layout"]:
            held[name] = held.get(name, 0) + numel
    whole = sum(value.numel() for value in ranks[0]["expected"].values())
    assert sum(held.values()) == whole, "an element is sent twice, or not at all"


def assert_exported(kind: Kind, rank: dict[str, Any]) -> None:
    """The export is what `averaged()` held, under the whole model's names."""
    if kind.divides == "tensor":
        assert "more slices that AutoTP has cut, and nothing says how" in rank["exported"]
        return
    assert rank["exported"].keys() == rank["averaged"].keys()
    for name, value in rank["averaged"].items():
        dtype = torch.float32 if kind.precision == "fp32" else torch.bfloat16
        assert torch.equal(rank["exported"][name].to(dtype).float(), value), name


def assert_clusters_agree(ranks: list[dict[str, Any]]) -> None:
    half = len(ranks) // 2
    for ours, theirs in zip(ranks[:half], ranks[half:], strict=True):
        pairs = zip(ours["anchors"], theirs["anchors"], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        for name, value in ours["averaged"].items():
            assert torch.equal(value, theirs["averaged"][name]), name
            assert torch.equal(value, ranks[0]["averaged"][name]), name


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Any:
    base = str(tmp_path_factory.mktemp("few"))
    return run_distributed(train_all, 4, FEW, base, timeout_seconds=200)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Any:
    base = str(tmp_path_factory.mktemp("more"))
    return run_distributed(train_all, 4, MORE, base, timeout_seconds=280)


@pytest.fixture(scope="module")
def of_eight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two ranks that hold the same in each cluster, beside those that hold other parts."""
    base = str(tmp_path_factory.mktemp("eight"))
    return run_distributed(train_all, 8, FEW + MORE + FURTHER, base, timeout_seconds=800)


@pytest.mark.parametrize("kind", FEW, ids=name_of)
def test_equals_plain_torch_and_resumes(kind: Kind, few: Any) -> None:
    assert_trained(kind, [rank[FEW.index(kind)] for rank in few])


@pytest.mark.ci
@pytest.mark.parametrize("kind", MORE, ids=name_of)
def test_more_equal_plain_torch_and_resume(kind: Kind, more: Any) -> None:
    assert_trained(kind, [rank[MORE.index(kind)] for rank in more])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", FEW + MORE + FURTHER, ids=name_of)
def test_four_ranks_a_cluster(kind: Kind, of_eight: Any) -> None:
    assert_trained(kind, [rank[(FEW + MORE + FURTHER).index(kind)] for rank in of_eight])


def go_on_from_plain(kinds: list[Kind], base: str) -> list[dict[str, Any]]:
    """Train plain DeepSpeed; one cluster alone, and from its checkpoint, must equal it."""
    quiet()
    return [compare(kind, f"{base}/{number}") for number, kind in enumerate(kinds)]


def compare(kind: Kind, base: str) -> dict[str, Any]:
    steps, middle = range(1, 2 * H + 2), H + 1
    engine = initialize_plain(kind, **ALONE)
    begin, losses = inner_snapshot(engine), []
    for step in steps:
        losses += take_step(engine, kind, step, 0)
        if step == middle:
            engine.save_checkpoint(base, tag="plain")
    ended = inner_snapshot(engine)
    engine.destroy()
    engine = initialize(kind, seed=0, **ALONE)
    ours = [loss for step in steps for loss in take_step(engine, kind, step, 0)]
    found = {
        "losses": ours == losses,
        "moved": bool(differences(begin, ended)),
        "differ": differences(inner_snapshot(engine), ended),
        "syncs": engine.dsx.totals.syncs,
    }
    end(engine)
    engine = initialize(kind, seed=1, **ALONE)
    engine.load_checkpoint(base)
    for step in range(middle + 1, 2 * H + 2):
        take_step(engine, kind, step, 0)
    found["from plain"] = differences(inner_snapshot(engine), ended)
    end(engine)
    return found


@pytest.mark.ci
@pytest.mark.parametrize(
    ("num_ranks", "kinds"),
    [(2, FEW + MORE), pytest.param(4, FEW + MORE + FURTHER, marks=pytest.mark.slow)],
    ids=["two ranks", "four ranks"],
)
def test_one_cluster_equals_plain_deepspeed(
    num_ranks: int, kinds: list[Kind], tmp_path: Any
) -> None:
    trained = run_distributed(
        go_on_from_plain, num_ranks, kinds, str(tmp_path), timeout_seconds=280
    )
    for rank in trained:
        for kind, found in zip(kinds, rank, strict=True):
            assert found["losses"] and found["moved"] and found["syncs"] == 2, name_of(kind)
            assert found["differ"] == [] and found["from plain"] == [], name_of(kind)


def train_methods(base: str) -> list[list[dict[str, Any]]]:
    quiet()
    blocks = {"low rank": LOW_RANK, "norms": NORMS}
    return [
        [train_and_resume(kind, f"{base}/{kind.divides}/{name}", **b) for name, b in blocks.items()]
        for kind in OF_METHODS
    ]


@pytest.mark.ci
def test_whole_matrices_and_norms_agree_and_resume(tmp_path: Any) -> None:
    trained = run_distributed(train_methods, 4, str(tmp_path), timeout_seconds=280)
    for number, kind in enumerate(OF_METHODS):
        for method in range(2):
            ranks = [rank[number][method] for rank in trained]
            assert all(r["loaded"] == [] and r["resumed"] == [] for r in ranks), name_of(kind)
            assert_clusters_agree(ranks)
