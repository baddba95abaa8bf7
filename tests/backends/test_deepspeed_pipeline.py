"""DeepSpeed pipelines of two stages in two clusters, against the plain-torch reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.backends.engines import (
    ACCUMULATION,
    NUM_CLUSTERS,
    max_bit16_difference,
    quiet,
)
from tests.backends.pipelines import (
    NUM_STAGES,
    Kind,
    build_pipeline,
    fragments_of,
    reference,
    train_batch,
)
from tests.distributed import run_distributed

pytest.importorskip("deepspeed")

NUM_STEPS = 14  # more than three outer rounds of H = 4 on every stage

KINDS = [
    Kind(0),
    Kind(0, is_tied=True),
    Kind(1),
    Kind(1, is_tied=True),
    Kind(1, is_tied=True, groups="two", optimizer="adamw"),
    Kind(1, groups="two", preset="co2"),
    Kind(0, is_tied=True, groups="two", preset="eager"),
    Kind(1, is_tied=True, preset="diloco"),
    Kind(0, "bf16", is_tied=True),
    Kind(1, "bf16", is_tied=True, groups="two"),
    Kind(1, "bf16+fp32", groups="two"),
    Kind(1, "bf16+fp32", is_tied=True),
]
SHARDED = [
    Kind(0, is_tied=True),
    Kind(1, is_tied=True, groups="two", optimizer="adamw"),
    Kind(1, groups="two", preset="co2"),
    Kind(1, is_tied=True, groups="two", preset="eager"),
    Kind(0, "bf16", is_tied=True),
    Kind(1, "bf16+fp32", is_tied=True, groups="two"),
]


def own_weights(engine: Any) -> dict[str, torch.Tensor]:
    """This stage's weights in fp32, by the names that the backend gives them."""
    from dsx.backends.deepspeed_pipeline import name_in_model

    named = name_in_model(engine, dict(engine.module.named_parameters()))
    return {name: p.detach().float().clone() for name, p in named.items()}


def tied_bits(engine: Any) -> list[Any]:
    """The tied weight as trained and its master, where this rank holds any."""
    from dsx.backends.deepspeed_masters import locate, trained_parameters

    name = "tied_modules.ends.weight"
    parameters = trained_parameters(engine)
    if name not in parameters:
        return []
    piece = locate(engine).pieces(parameters).get(name)
    master = [] if piece is None else [piece.start, piece.view().clone().numpy()]
    return [parameters[name].detach().float().clone().numpy(), *master]


def train_kinds(kinds: list[Kind]) -> list[dict[str, Any]]:
    quiet()
    results = []
    for kind in kinds:
        engine = build_pipeline(kind)
        apart, tied = [], []
        for step in range(1, NUM_STEPS + 1):
            train_batch(engine, step)
            apart.append(max_bit16_difference(engine))
            tied.append(tied_bits(engine))
        results.append(outcome(engine, apart, tied))
        engine.dsx.close()
        engine.destroy()
    return results


def outcome(engine: Any, apart: list[float], tied: list[Any]) -> dict[str, Any]:
    loop = engine.dsx.loop
    return {
        "cluster": engine.dsx.cluster_id,
        "stage": loop.backend.stage.index,
        "wrapper": type(engine.optimizer).__name__,
        "weights": {name: w.numpy() for name, w in own_weights(engine).items()},
        "anchors": [a.clone().numpy() for a in loop.state.anchor],
        "names": [[s.name for s in f.layout] for f in loop.backend.fragments],
        "stages": {f.stage for f in loop.backend.fragments},
        "bit16_difference": max(apart),
        "tied": tied,
        "rounds": loop.history.rounds,
        "step": engine.dsx.step,
    }


@pytest.fixture(scope="module")
def trained() -> list[list[dict[str, Any]]]:
    return run_distributed(train_kinds, 4, KINDS, timeout_seconds=200)


def assert_equals_the_reference(
    kind: Kind, results: list[dict[str, Any]], skipped: list[tuple[int, int]], most: float
) -> None:
    ranks = len(results) // NUM_CLUSTERS
    data_ranks = ranks // NUM_STAGES
    expected = reference(kind, NUM_STEPS, data_ranks * ACCUMULATION, skipped)
    worst = 0.0
    for result in results:
        assert result["bit16_difference"] == 0.0
        assert result["step"] == NUM_STEPS
        assert result["stages"] == {result["stage"]}
        assert min(result["rounds"]) >= 2
        for name, value in result["weights"].items():
            difference = torch.from_numpy(value) - expected[result["cluster"]][name]
            worst = max(worst, difference.abs().max().item())
    print(f"{kind} {results[0]['wrapper']}: {worst:.1e}")
    assert worst <= most
    names = [result["names"] for result in results[:ranks]]
    for index, fragments in enumerate(fragments_of(kind)):
        held = names[index * data_ranks : (index + 1) * data_ranks]
        together = [{n for rank in held for n in rank[p]} for p in range(len(fragments))]
        assert together == [set(names) for names in fragments]
    for ours, theirs in zip(results[:ranks], results[ranks:], strict=True):
        pairs = zip(ours["anchors"], theirs["anchors"], strict=True)
        assert all((a == b).all() for a, b in pairs)


def assert_copies_are_equal(results: list[dict[str, Any]]) -> None:
    """After every step, of the weights and of the masters, wherever they are cut."""
    ranks = len(results) // NUM_CLUSTERS
    for cluster in range(NUM_CLUSTERS):
        own = results[cluster * ranks : (cluster + 1) * ranks]
        for step in range(NUM_STEPS):
            tied = [result["tied"][step] for result in own]
            assert len({weight.tobytes() for weight, *_ in tied}) == 1
            wholes = []
            for stage in range(NUM_STAGES):
                pieces = [t[1:] for t, r in zip(tied, own, strict=True) if r["stage"] == stage]
                held = {start: piece for start, piece in filter(None, pieces)}
                wholes.append(b"".join(held[start].tobytes() for start in sorted(held)))
            assert wholes[0] == wholes[1]
    first = results[0]["tied"]
    assert first[0][0].tobytes() != first[-1][0].tobytes()


def check(kind: Kind, results: list[dict[str, Any]]) -> None:
    assert_equals_the_reference(kind, results, [], 1e-6 if kind.precision == "fp32" else 2e-2)
    if kind.is_tied:
        assert_copies_are_equal(results)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_equals_the_reference(kind: Kind, trained: list[list[dict[str, Any]]]) -> None:
    check(kind, [rank[KINDS.index(kind)] for rank in trained])


@pytest.mark.slow
def test_stages_of_two_ranks_equal_the_reference() -> None:
    trained = run_distributed(train_kinds, 8, SHARDED, timeout_seconds=280)
    for index, kind in enumerate(SHARDED):
        check(kind, [rank[index] for rank in trained])
