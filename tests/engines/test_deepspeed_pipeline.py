"""DeepSpeed pipelines of two stages in two clusters, against the plain-torch reference."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from dsx.comm.world import current_world
from dsx.core.exchange import HEADER_BYTES
from dsx.engines.deepspeed.engine import start_engine
from dsx.engines.deepspeed.features import refuse_unsupported
from tests.distributed import run_distributed
from tests.engines.engines import (
    ACCUMULATION,
    NUM_CLUSTERS,
    allow_fp16,
    max_bit16_difference,
    quiet,
)
from tests.engines.pipelines import (
    NUM_STAGES,
    OVERRIDES,
    Kind,
    build_pipeline,
    engine_arguments,
    fragments_of,
    reference,
    train_batch,
)
from tests.engines.test_deepspeed_traffic import Collectives
from tests.installed import needs
from tests.telemetry.trace.runs import read_timeline
from tests.tiny import WIDTH, H

pytestmark = needs("deepspeed")

NUM_STEPS = 14  # more than three outer rounds of H = 4 on every stage

KINDS = [
    Kind(0),
    Kind(0, is_tied=True, groups="two", preset="eager"),
    Kind(1, is_tied=True, groups="two", optimizer="adamw"),
    Kind(1, groups="two", optimizer="adamw", preset="dreamddp"),
]
FURTHER = [
    Kind(1, groups="two", preset="co2"),
    Kind(1, "bf16+fp32", is_tied=True),
    Kind(0, is_tied=True, preset="dreamddp"),  # launched in the last micro-batch's backward
]
MORE = [
    Kind(0, is_tied=True),
    Kind(1),
    Kind(1, is_tied=True),
    Kind(1, is_tied=True, preset="diloco"),
    Kind(0, "bf16", is_tied=True),
    Kind(1, "bf16", is_tied=True, groups="two"),
    Kind(1, "bf16+fp32", groups="two"),
]
SHARDED = [
    Kind(0, is_tied=True),
    Kind(1, is_tied=True, groups="two", optimizer="adamw"),
    Kind(1, groups="two", preset="co2"),
    Kind(1, is_tied=True, groups="two", preset="eager"),
    Kind(1, is_tied=True, groups="two", preset="dreamddp"),
    Kind(0, "bf16", is_tied=True),
    Kind(1, "bf16+fp32", is_tied=True, groups="two"),
]
RESUMED = [Kind(1, is_tied=True, groups="two", optimizer="adamw")]
STOPS, LAST_STEP = (5, 6), 9
OVERFLOWN = Kind(1, "fp16", is_tied=True, groups="two")
TALKING = [Kind(1, preset="diloco"), Kind(1, is_tied=True, groups="two", preset="diloco")]
SKIPPED = (4, 6, 7)  # what stage 0 launches and applies, and stage 1 launches and applies
DECIDING: dict[str, tuple[str, dict[str, Any]]] = {
    "measured": (
        "cocodc",
        {"schedule": {"interval": 6, "gamma": 0.7}, "fragments": {"num_fragments": 2},
         "delay": {"steps": 1}},
    ),
    "coded": (
        "streaming_diloco",
        {"schedule": {"interval": 4}, "delay": {"steps": 1},  # "auto": three layers, and fragments
         "compression": {"type": "quantized", "wire": "int4", "error_feedback": "bf16"}},
    ),
    "layerwise, measured": ("dreamddp", {"schedule": {"interval": 3}, "fragments": {}}),
}  # fmt: skip


def own_weights(engine: Any) -> dict[str, torch.Tensor]:
    """This stage's weights in fp32, by the names that the backend gives them."""
    from dsx.engines.deepspeed.pipeline import name_in_model

    named = name_in_model(engine, dict(engine.module.named_parameters()))
    return {name: p.detach().float().clone() for name, p in named.items()}


def tied_bits(engine: Any) -> list[Any]:
    """The tied weight as trained and its master, where this rank holds any."""
    from dsx.engines.deepspeed.masters import locate
    from dsx.engines.deepspeed.parameters import trained_parameters

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


def keep_in_touch(base: str) -> dict[str, Any]:
    """Train with records, finish, export, go on."""
    kind = Kind(1, "bf16", is_tied=True, groups="two")
    engine = build_pipeline(kind, {"metrics": {"dir": base, "trace": True}})
    for step in range(1, NUM_STEPS + 1):
        train_batch(engine, step)
    engine.dsx.finish()
    before, sent = own_weights(engine), engine.dsx.totals.bytes_sent
    with engine.dsx.averaged():
        exported, tied = own_weights(engine), tied_bits(engine)
        apart = max_bit16_difference(engine)
    restored = own_weights(engine)
    engine.dsx.close()
    engine.destroy()
    return {
        "exported": {name: w.numpy() for name, w in exported.items()},
        "tied": tied,
        "bit16_difference": apart,
        "is_restored": all(torch.equal(w, before[n]) for n, w in restored.items()),
        "bytes_sent": sent,
    }


def stop_and_resume(base: str, kind: Kind) -> dict[str, Any]:
    """Save while fragments are under way, and go on from there in a new engine."""
    engine = build_pipeline(kind)
    in_flight = []
    for step in range(1, LAST_STEP + 1):
        train_batch(engine, step)
        if step in STOPS:
            in_flight.append([t.fragment for t in engine.dsx.loop.in_flight])
            engine.save_checkpoint(base, tag=f"step{step}")
    expected = own_weights(engine)
    engine.dsx.close()
    engine.destroy()
    equal = []
    for stop in STOPS:
        resumed = build_pipeline(kind)
        resumed.load_checkpoint(base, tag=f"step{stop}")
        for step in range(resumed.dsx.step + 1, LAST_STEP + 1):
            train_batch(resumed, step)
        equal.append(all(torch.equal(w, expected[n]) for n, w in own_weights(resumed).items()))
        resumed.dsx.close()
        resumed.destroy()
    return {"equal": equal, "in_flight": in_flight}


def decide_by_stage(num_stages: int) -> dict[str, Any]:
    """Stages that measure, code and choose for themselves: other bits, other steps."""
    results = {}
    for name, (preset, changes) in DECIDING.items():
        if num_stages > 2:  # of one layer or two
            changes = {**changes, "fragments": {"num_fragments": "auto"}}
        engine = build_pipeline(Kind(1, is_tied=True, preset=preset), changes, num_stages)
        tied = []
        for step in range(1, NUM_STEPS + 1):
            train_batch(engine, step)
            tied.append(tied_bits(engine))
        results[name] = outcome(engine, [0.0], tied)
        engine.dsx.close()
        engine.destroy()
    return results


def overflow_on_due_steps() -> dict[str, Any]:
    allow_fp16()
    engine = build_pipeline(OVERFLOWN)
    apart, tied, skipped = [], [], []
    for step in range(1, NUM_STEPS + 1):
        before = engine.skipped_steps
        train_batch(engine, step, poison=engine.dsx.cluster_id == 0 and step in SKIPPED)
        if engine.skipped_steps > before:
            skipped.append(step)
        apart.append(max_bit16_difference(engine))
        tied.append(tied_bits(engine))
    result = {**outcome(engine, apart, tied), "skipped": skipped}
    engine.dsx.close()
    engine.destroy()
    return result


def traffic(kind: Kind) -> list[Counter[tuple[str, int]]]:
    """What dsx adds to the collectives of each step."""
    engine = build_pipeline(kind)
    cluster = engine.dsx.cluster_id
    arguments = engine_arguments(kind)
    seen = []
    for alone in (False, True):
        if alone:
            engine = start_engine(**arguments)[0]
        seen.append([])
        for step in range(1, 9):
            with Collectives() as collectives:
                train_batch(engine, step, cluster=cluster)
            seen[-1].append(collectives.seen)
        if not alone:
            engine.dsx.close()
        engine.destroy()
    for both, one in zip(*seen, strict=True):
        assert sum(one.values()) > 0
        both.subtract(one)
    return [Counter({k: n for k, n in step.items() if n}) for step in seen[0]]


def refusals() -> dict[str, str]:
    messages = {}
    settings: dict[str, tuple[Kind, dict[str, Any]]] = {
        "zero": (Kind(2), {}),
        "fragments": (Kind(0), {"fragments": {"num_fragments": 4}}),
        "layerwise": (
            Kind(0, preset="dreamddp"),
            {"schedule": {**OVERRIDES["dreamddp"]["schedule"], "when": "after"}},
        ),
    }
    for name, (kind, changes) in settings.items():
        try:
            build_pipeline(kind, changes)
        except ValueError as error:
            messages[name] = str(error)
    cluster = current_world().cluster_id
    try:
        build_pipeline(Kind(0), num_stages=NUM_STAGES - cluster)
    except ValueError as error:
        messages["cut"] = str(error)
    engine = build_pipeline(Kind(0))
    engine.grid.model_parallel_size = 2  # as with an axis "model" in the topology
    try:
        refuse_unsupported(engine)
    except ValueError as error:
        messages["slices"] = str(error)
    engine.dsx.close()
    return messages


def run_all(base: str) -> dict[str, Any]:
    return {
        "kinds": train_kinds(KINDS),
        "touch": keep_in_touch(f"{base}/metrics"),
        "resumed": [stop_and_resume(f"{base}/{i}", kind) for i, kind in enumerate(RESUMED)],
        "deciding": decide_by_stage(NUM_STAGES),
        "overflow": overflow_on_due_steps(),
        "traffic": [traffic(kind) for kind in TALKING],
        "refusals": refusals(),
        "base": base,
    }


def outcome(engine: Any, apart: list[float], tied: list[Any]) -> dict[str, Any]:
    loop = engine.dsx.loop
    return {
        "cluster": engine.dsx.cluster_id,
        "stage": loop.adapter.stage.index,
        "wrapper": type(engine.optimizer).__name__,
        "weights": {name: w.numpy() for name, w in own_weights(engine).items()},
        "anchors": [a.clone().numpy() for a in loop.state.anchor],
        "names": [[s.name for s in f.layout] for f in loop.adapter.fragments],
        "stages": {f.stage for f in loop.adapter.fragments},
        "bit16_difference": max(apart),
        "tied": tied,
        "rounds": loop.history.rounds,
        "plan": loop.history.plan,
        "step": engine.dsx.step,
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    base = str(tmp_path_factory.mktemp("pipeline"))
    return run_distributed(run_all, 4, base, timeout_seconds=240)


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
            tied = [(r["stage"], *r["tied"][step]) for r in own if r["tied"][step]]
            assert len({weight.tobytes() for _, weight, *_ in tied}) == 1
            wholes = []
            for holder in sorted({stage for stage, *_ in tied}):
                pieces = [master for stage, _, *master in tied if stage == holder]
                held = {start: piece for start, piece in filter(None, pieces)}
                wholes.append(b"".join(held[start].tobytes() for start in sorted(held)))
            assert len(wholes) == NUM_STAGES and wholes[0] == wholes[1]
    first = results[0]["tied"]
    assert first[0][0].tobytes() != first[-1][0].tobytes()


def check(kind: Kind, results: list[dict[str, Any]]) -> None:
    assert_equals_the_reference(kind, results, [], 1e-6 if kind.precision == "fp32" else 2e-2)
    if kind.is_tied:
        assert_copies_are_equal(results)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_equals_the_reference(kind: Kind, outcomes: list[dict[str, Any]]) -> None:
    check(kind, [rank["kinds"][KINDS.index(kind)] for rank in outcomes])


@pytest.mark.parametrize(
    "kinds",
    [pytest.param(FURTHER, marks=pytest.mark.ci), pytest.param(MORE, marks=pytest.mark.slow)],
    ids=["further", "more"],
)
def test_more_kinds_equal_the_reference(kinds: list[Kind]) -> None:
    trained = run_distributed(train_kinds, 4, kinds, timeout_seconds=280)
    for index, kind in enumerate(kinds):
        check(kind, [rank[index] for rank in trained])


@pytest.mark.slow
def test_stages_of_two_ranks_equal_the_reference() -> None:
    trained = run_distributed(train_kinds, 8, SHARDED, timeout_seconds=280)
    for index, kind in enumerate(SHARDED):
        check(kind, [rank[index] for rank in trained])


def test_records_tell_the_stage_and_show_stages_in_turn(outcomes: list[dict[str, Any]]) -> None:
    """H = 4, two fragments on each of two stages: one of the four is sent at every step."""
    base = Path(outcomes[0]["base"]) / "metrics"
    for cluster, name in enumerate(("metrics.jsonl", "metrics.cluster_1.jsonl")):
        records = [json.loads(line) for line in (base / name).read_text().splitlines()]
        syncs = [r for r in records if r["kind"] == "sync"]
        launched = sorted((r["launched_step"], r["stage"], r["fragment"]) for r in syncs)
        turns = [(0, 0), (1, 0), (0, 1), (1, 1)]  # (stage, fragment) from step 2 on
        assert launched == [(t, *turns[(t - 2) % 4]) for t in range(2, NUM_STEPS + 1)]
        ranks = outcomes[2 * cluster : 2 * cluster + 2]
        headers = 4 * HEADER_BYTES  # each fragment's last mean is compared at the end
        sent = sum(r["touch"]["bytes_sent"] for r in ranks) - headers
        assert sum(r["bytes_sent"] for r in syncs) == sent
        assert records[-1]["kind"] == "finish"
        assert records[-1]["bytes_sent"] == sum(r["bytes_sent"] for r in syncs)


def test_a_trace_tells_the_micro_batches_of_every_stage(outcomes: list[dict[str, Any]]) -> None:
    timeline = read_timeline(Path(outcomes[0]["base"]) / "metrics")
    counts = Counter((s.rank, s.name, s.step) for s in timeline.spans)
    for rank in timeline.ranks:
        for step in range(1, NUM_STEPS + 1):
            for name in ("forward", "backward"):
                assert counts[rank, name, step] == ACCUMULATION, (rank, name, step)
            assert counts[rank, "optimizer step", step] == 1


def test_the_export_is_the_same_everywhere_and_leaves_no_trace(outcomes: Any) -> None:
    results = [rank["touch"] for rank in outcomes]
    for stage in range(NUM_STAGES):
        ours, theirs = results[stage]["exported"], results[stage + 2]["exported"]
        assert all((ours[name] == theirs[name]).all() for name in ours)
    for result in results:
        assert result["is_restored"]
        assert result["bit16_difference"] == 0.0
        assert (result["tied"][0] == results[0]["tied"][0]).all()
        assert (result["tied"][2] == results[0]["tied"][2]).all()


@pytest.mark.parametrize("kind", RESUMED, ids=str)
def test_resume_is_bit_for_bit(kind: Kind, outcomes: list[dict[str, Any]]) -> None:
    under_way = [rank["resumed"][RESUMED.index(kind)]["in_flight"] for rank in outcomes]
    assert under_way[0] != under_way[1]  # stages stop at other places of their round
    for rank, in_flight in zip(outcomes, under_way, strict=True):
        assert all(in_flight)
        assert rank["resumed"][RESUMED.index(kind)]["equal"] == [True] * len(STOPS)


@pytest.mark.parametrize("name", DECIDING)
def test_copies_stay_equal_whatever_stages_decide(name: str, outcomes: Any) -> None:
    results = [rank["deciding"][name] for rank in outcomes]
    check_decisions(results)
    if name.startswith("layerwise"):  # each stage its own table, of what its backwards take
        assert all(result["plan"]["is_measured"] for result in results)
        for ours, theirs in zip(results[:2], results[2:], strict=True):
            assert ours["plan"] == theirs["plan"]


@pytest.mark.slow
def test_copies_stay_equal_on_the_first_and_the_last_of_four_stages() -> None:
    """Those between hold none."""
    decided = run_distributed(decide_by_stage, 8, 4, timeout_seconds=280)
    for name in DECIDING:
        results = [rank[name] for rank in decided]
        assert [bool(result["tied"][0]) for result in results[:4]] == [True, False, False, True]
        check_decisions(results)


def check_decisions(results: list[dict[str, Any]]) -> None:
    assert_copies_are_equal(results)
    ranks = len(results) // NUM_CLUSTERS
    for ours, theirs in zip(results[:ranks], results[ranks:], strict=True):
        assert ours["rounds"] == theirs["rounds"]
        pairs = zip(ours["anchors"], theirs["anchors"], strict=True)
        assert all((a == b).all() for a, b in pairs)


def test_overflow_in_one_cluster_neither_hangs_nor_separates(outcomes: Any) -> None:
    results = [rank["overflow"] for rank in outcomes]
    for result in results:
        assert result["skipped"] == ([] if result["cluster"] else list(SKIPPED))
    skipped = [(0, step) for step in SKIPPED]
    assert_equals_the_reference(OVERFLOWN, results, skipped, 5e-3)
    assert_copies_are_equal(results)


def test_a_step_sends_what_deepspeed_sends(outcomes: list[dict[str, Any]]) -> None:
    """And one number per tied weight; at a sync the parity result and sums, and the tied weight.

    Before it, whether the mean is there on all ranks of the stage, or is put off. At every H-th
    step all stages also tell each other whether there is a notice: over a group of dsx's own, which
    is not counted here.
    """
    numbers = (2, 2 * (7 + NUM_CLUSTERS) * NUM_CLUSTERS + 2 * (3 + NUM_CLUSTERS))
    parity = Counter({("allgather_", n): 1 for n in numbers})  # over the one rank of a stage
    flag, weight = (Counter({("allreduce_", n): 1}) for n in (1, WIDTH * WIDTH))
    for rank in outcomes:
        plain, tied = rank["traffic"]
        for step in range(2, 9):
            is_sync = step % H == 0
            at_sync = parity if is_sync else Counter[tuple[str, int]]()
            assert plain[step - 1] == at_sync
            assert tied[step - 1] == flag + at_sync + (weight if is_sync else Counter())


def test_what_pipelines_do_not_allow_is_refused_by_name(outcomes: list[dict[str, Any]]) -> None:
    messages = outcomes[0]["refusals"]
    assert messages["zero"].startswith("zero_optimization.stage=2 with a PipelineModule: ")
    assert messages["zero"].endswith("use stage 0 or 1")
    assert messages["fragments"].startswith("pipeline stage 0 of 2, which is cut into fragments")
    assert "num_fragments=4 exceeds the model's 3 layers" in messages["fragments"]
    assert messages["layerwise"].startswith("dsx.schedule.when='after' takes a layer's optimizer")
    for rank in outcomes:
        assert "a topology with 2 slices of each layer" in rank["refusals"]["slices"]
        assert rank["refusals"]["cut"].startswith("clusters do not match at pipeline_stage")
