"""What happens to DeepSpeed's tensors outside a step: export, offload_states, sharing out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dsx.core.exchange import COMMIT_BYTES, HEADER_BYTES
from tests.distributed import run_distributed
from tests.engines.engines import (
    RANKS_PER_CLUSTER,
    Kind,
    OddNet,
    build_engine,
    max_bit16_difference,
    quiet,
    train_step,
    weights,
)
from tests.held_memory import held_bytes
from tests.installed import needs

pytestmark = needs("deepspeed")

NUM_STEPS, PAUSE = 7, 3  # steps; the pause comes while a fragment is under way
EXPORTED = [
    Kind(0, groups="two"),
    Kind(0, "bf16"),
    Kind(1, "bf16+fp32"),
    Kind(2, "bf16", groups="two"),
    Kind(3, "bf16", groups="two", zero=("sub_groups", "some_persistent")),
]
OFFLOADED = [
    Kind(1, "bf16", groups="two", optimizer="adamw"),
    Kind(2, optimizer="adamw"),
    Kind(3, "bf16", groups="two", optimizer="adamw", zero=("sub_groups", "some_persistent")),
]


def loss_now(engine: Any) -> float:
    from tests.tiny import batch

    x, y = batch(0, 1)
    with torch.no_grad():
        return engine(x.to(next(engine.module.parameters()).dtype), y).item()


def export(kind: Kind) -> dict[str, Any]:
    engine = build_engine(kind)
    for step in range(1, NUM_STEPS + 1):
        train_step(engine, step)
    engine.dsx.finish()
    rounds, bytes_sent = list(engine.dsx.loop.history.rounds), engine.dsx.totals.bytes_sent
    before = weights(engine)
    loss_now(engine)  # gathers weights, which the export must replace
    with engine.dsx.averaged():
        exported = {n: w.numpy() for n, w in weights(engine).items()}
        apart = max_bit16_difference(engine)
        loss = loss_now(engine)
    restored = weights(engine)
    train_step(engine, NUM_STEPS + 1)
    result = {
        "exported": exported,
        "loss": loss,
        "is_restored": all(torch.equal(w, before[n]) for n, w in restored.items()),
        "has_changed": any((w.numpy() != exported[n]).any() for n, w in before.items()),
        "bit16_difference": max(apart, max_bit16_difference(engine)),
        "bytes_sent": bytes_sent,
        "rounds": rounds,
        "numel": [f.numel for f in engine.dsx.loop.adapter.fragments],
        "memory": memory(engine.dsx),
    }
    engine.dsx.close()
    engine.destroy()
    return result


def memory(handle: Any) -> tuple[int, int, int, int]:
    """Bytes predicted and held: of state that is sharded, and of collectives' buffers."""
    state, predicted = handle.loop.state, handle.memory
    replicated = handle.loop.adapter._replica_shards
    sets = [] if replicated is None else replicated._sets
    buffers = sum(4 * b.numel() for one in sets for b in one._gathered or ())
    apart = predicted.work_space + predicted.in_the_cluster + predicted.channels
    sharded = predicted.total - apart
    return sharded, held_bytes(state), predicted.in_the_cluster, buffers


def pause(kind: Kind, is_offloaded: bool) -> dict[str, Any]:
    engine = build_engine(kind)
    refusal = ""
    are_freed = []
    for step in range(1, NUM_STEPS + 1):
        train_step(engine, step)
        if step == PAUSE and is_offloaded:
            masters = engine.dsx.loop.adapter._place.optimizer_tensors()
            kept = [StorageWeakRef(master.untyped_storage()) for master in masters]
            engine.offload_states()
            are_freed = [storage.expired() for storage in kept]
            try:
                engine.dsx.loop.adapter.sync_model_weights()
            except RuntimeError as error:
                refusal = str(error)
            engine.reload_states()
    result = {n: w.numpy() for n, w in weights(engine).items()}
    engine.dsx.close()
    engine.destroy()
    return {"weights": result, "are_freed": are_freed, "refusal": refusal}


def run_all() -> dict[str, Any]:
    import deepspeed.ops.adam.fused_adam as fused

    quiet()
    exports = [export(kind) for kind in EXPORTED]
    fused.FusedAdam = torch.optim.AdamW  # ZeRO-3 moves the states of that class only
    pauses = [[pause(kind, is_offloaded) for is_offloaded in (False, True)] for kind in OFFLOADED]
    return {"export": exports, "pause": pauses}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return run_distributed(run_all, 4, timeout_seconds=240)


def name_of(kind: Kind) -> str:
    return "-".join([str(part) for part in kind[:-1]] + list(kind.zero))


@pytest.mark.parametrize("kind", EXPORTED, ids=name_of)
def test_the_export_is_the_same_everywhere_and_leaves_no_trace(kind: Kind, outcomes: Any) -> None:
    results = [rank["export"][EXPORTED.index(kind)] for rank in outcomes]
    for result in results:
        for name, value in results[0]["exported"].items():
            assert (result["exported"][name] == value).all()
        assert result["loss"] == results[0]["loss"]
        assert result["has_changed"]
        assert result["is_restored"]
        assert result["bit16_difference"] == 0.0


def test_replicas_share_out_what_crosses_between_clusters(outcomes: Any) -> None:
    """Each rank sends its half of every fragment, not all of it."""
    results = [rank["export"][0] for rank in outcomes]
    numel = sum(p.numel() for p in OddNet().parameters())
    for fragment in range(len(results[0]["numel"])):
        replicated = [result["numel"][fragment] for result in results[:RANKS_PER_CLUSTER]]
        assert max(replicated) - min(replicated) <= 1
    assert sum(sum(r["numel"]) for r in results[:RANKS_PER_CLUSTER]) == numel
    for result in results:
        pairs = zip(result["rounds"], result["numel"], strict=True)
        # C = 2: each element of the share once each way; and the comparison
        sent = sum(
            k * (4 * share + HEADER_BYTES + COMMIT_BYTES) + HEADER_BYTES for k, share in pairs
        )
        assert result["bytes_sent"] == sent


def test_memory_is_predicted_for_every_stage(outcomes: Any) -> None:
    """Sharded as the masters are: no rank holds more than its part, and ZeRO-0 shares it out."""
    numel = sum(p.numel() for p in OddNet().parameters())
    for index, kind in enumerate(EXPORTED):
        ranks = [rank["export"][index]["memory"] for rank in outcomes]
        for predicted, held, buffers_predicted, buffers in ranks:
            assert predicted == held
            assert buffers_predicted == buffers
            assert (buffers > 0) == (kind.stage == 0)
        # anchor, momentum, what is sent and the wire, each once in the cluster
        assert sum(held for _, held, _, _ in ranks[:RANKS_PER_CLUSTER]) == 4 * 4 * numel


@pytest.mark.parametrize("kind", OFFLOADED, ids=name_of)
def test_training_goes_on_after_offload_states(kind: Kind, outcomes: Any) -> None:
    """DeepSpeed replaces the storage of its tensors, and dsx keeps no old one alive."""
    for rank in outcomes:
        alone, paused = rank["pause"][OFFLOADED.index(kind)]
        for name, value in alone["weights"].items():
            assert (paused["weights"][name] == value).all()
        assert paused["are_freed"] and all(paused["are_freed"])
        assert "away from the model" in paused["refusal"]
        assert "call engine.reload_states() first" in paused["refusal"]
