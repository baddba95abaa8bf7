"""A pipeline goes on with other stages, ranks or clusters, or says what to do instead."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dsx
from dsx.checkpoint.files import SavedRank, rank_file
from dsx.comm.world import current_world
from dsx.core import types
from tests.distributed import run_distributed
from tests.engines.engines import ds_config, make_optimizer, quiet
from tests.engines.pipelines import Kind, make_module, param_groups, train_batch
from tests.engines.test_deepspeed_resharding import convert, end
from tests.installed import needs

pytestmark = needs("deepspeed")

STOP, NUM_STEPS = 6, 10
ADAM = Kind(1, optimizer="adamw", groups="two")
CODED = {
    "preset": "diloco",
    "schedule": {"interval": 4},
    "compression": {"type": "quantized", "wire": "int4", "error_feedback": "fp32"},
    "fragments": {"by": "layer", "num_fragments": 2},
}
SIZES = {"preset": "co2", "schedule": {"interval": 4}}  # sizes of steps, one per parameter
STREAMED = {
    "preset": "streaming_diloco",
    "schedule": {"interval": 4},
    "delay": {"steps": 2},
    "fragments": {"num_fragments": 2},
}
BLOCKS = {"coded": CODED, "streamed": STREAMED, "drained": STREAMED, "sizes": SIZES}
Elements = dict[str, dict[str, dict[int, float]]]


def build(
    kind: Kind, block: dict[str, Any], num_stages: int, num_clusters: int = 2, **changes: Any
) -> Any:
    config = {**ds_config(kind.stage, kind.precision, "diloco"), **changes}
    types.SMALL_NUMEL = 16  # weights of 36 elements are coded, too
    clusters = {"num_clusters": num_clusters, "deadline_seconds": 30}
    config["dsx"] = {**block, "clusters": clusters}
    if current_world() is None:
        import deepspeed  # noqa: F401 - which then joins the world

        dsx.init_distributed(config)
    model = make_module(kind, current_world().cluster_id, num_stages)
    groups = param_groups(dict(model.named_parameters()), kind.groups)
    optimizer = make_optimizer(kind.optimizer, groups)
    return dsx.initialize(model=model, config=config, optimizer=optimizer)[0]


def outer_state(engine: Any) -> Elements:
    """This cluster's outer state, by buffer, parameter and element."""
    loop = engine.dsx.loop
    found: Elements = {}

    def put(buffer: str, slots: Any, values: torch.Tensor, first: int = 0) -> None:
        for slot in slots:
            places = found.setdefault(buffer, {}).setdefault(slot.name, {})
            for index in range(slot.numel):
                place = slot.offset + index - first
                if 0 <= place < len(values):
                    key = slot.start + index
                    places[key] = places.get(key, 0.0) + float(values[place])

    for fragment in loop.adapter.fragments:
        slots = loop.state.slots[fragment.id]
        put("anchor", fragment.layout, loop.state.anchor[fragment.id])
        for name, values in slots.outer.items():
            put(name, fragment.layout, values)
        for name, values in slots.staleness.items():
            names = [p.name for p in loop.adapter.fragment_parameters[fragment.id]]
            if len(names) == len(values):
                for one, value in zip(names, values.tolist(), strict=True):
                    found.setdefault(name, {})[one] = {0: value}
        wire = loop.matrix_gathers[fragment.id].wire.layout
        for error in loop.state.channels[fragment.id].codec.errors.values():
            scale = engine.dsx.num_clusters if error.is_of_mean else 1
            put("residual", wire, error.residual.read() * scale, error.start)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    whole: Elements = {}
    for part in everyone:
        for buffer, parameters in part.items():
            for name, places in parameters.items():
                whole.setdefault(buffer, {}).setdefault(name, {}).update(places)
    return whole


def weights(engine: Any) -> dict[str, list[float]]:
    everyone: list[Any] = [None] * dist.get_world_size()
    named = engine.module.named_parameters()
    dist.all_gather_object(everyone, {n: p.flatten().tolist() for n, p in named})
    return {name: values for part in everyone for name, values in part.items()}


def go_on(engine: Any) -> dict[str, Any]:
    for step in range(STOP + 1, NUM_STEPS + 1):
        train_batch(engine, step)
    result = {"weights": weights(engine)}
    engine.dsx.finish()
    return {**result, "cluster": engine.dsx.cluster_id, "anchor": outer_state(engine)["anchor"]}


def save(base: str, num_stages: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Save at STOP and go on, uninterrupted; a checkpoint without ZeRO, too."""
    quiet()
    results: dict[str, Any] = {}
    for name in names:
        engine = build(ADAM, BLOCKS[name], num_stages)
        for step in range(1, STOP + 1):
            train_batch(engine, step)
        if name in ("drained", "sizes"):
            engine.dsx.finish()
        state = outer_state(engine)
        engine.save_checkpoint(f"{base}/{name}", tag="a")
        if engine.global_rank == 0:
            with contextlib.redirect_stdout(io.StringIO()):
                convert(Path(base) / name / f"cluster_{engine.dsx.cluster_id}" / "a")
        dist.barrier()
        results[name] = {**go_on(engine), "state": state}
        end(engine)
    engine = build(ADAM._replace(stage=0), CODED, num_stages)
    train_batch(engine, 1)
    engine.save_checkpoint(f"{base}/plain", tag="a")
    end(engine)
    return results


def resume(
    base: str, num_stages: int, num_clusters: int, names: tuple[str, ...], refused: bool = False
) -> dict[str, Any]:
    quiet()
    results: dict[str, Any] = {}
    universal = {"checkpoint": {"load_universal": True}}
    for name in names:
        engine = build(ADAM, BLOCKS[name], num_stages, num_clusters, **universal)
        read = read_while(lambda e=engine, n=name: e.load_checkpoint(f"{base}/{n}", tag="a"))
        results[name] = {"step": engine.dsx.step, "state": outer_state(engine), "read": read}
        engine.save_checkpoint(f"{base}/{name}_for_{num_stages}", tag="a")
        folder = Path(f"{base}/{name}_for_{num_stages}/cluster_{engine.dsx.cluster_id}/a")
        own = SavedRank(rank_file(folder, engine.global_rank))
        results[name]["kept"] = sum(own.read(kept).nbytes for kept in own._names)
        results[name].update(go_on(engine))
        end(engine)
    if refused:
        results["refused"] = refusals(base, num_stages, universal)
    return results


def read_while(load: Callable[[], Any]) -> int:
    """Return how many bytes of outer states this rank reads for what it keeps."""
    plain, read = SavedRank.read, [0]

    def counted(self: SavedRank, name: str, *part: int) -> torch.Tensor:
        found = plain(self, name, *part)
        read[0] += found.nbytes
        return found

    SavedRank.read = counted  # type: ignore[method-assign]
    try:
        load()
    finally:
        SavedRank.read = plain  # type: ignore[method-assign]
    return read[0]


def refusals(base: str, num_stages: int, universal: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    tied = Kind(1, is_tied=True, optimizer="adamw", groups="two")
    cases: dict[str, tuple[Kind, dict[str, Any], str, dict[str, Any]]] = {
        "not converted": (ADAM, CODED, "coded", {}),
        "in flight": (ADAM, STREAMED, "streamed", universal),
        "no ZeRO": (ADAM._replace(stage=0), CODED, "plain", {}),
        "0 to 1": (ADAM, CODED, "plain", {}),
        "1 to 0": (ADAM._replace(stage=0), CODED, "coded", {}),
        "model": (tied, CODED, "coded", universal),
    }
    for case, (kind, block, name, changes) in cases.items():
        engine = build(kind, block, num_stages, **changes)
        with pytest.raises(ValueError) as caught:
            engine.load_checkpoint(f"{base}/{name}", tag="a")
        found[case] = str(caught.value)
        end(engine)
    return found


def check(
    first: dict[int, Any], results: list[dict[str, Any]], name: str, is_other_number: bool = False
) -> None:
    """`first`: by cluster; every cluster has its own residuals, and all the rest is the same."""
    ended = [result[name]["anchor"] for result in results]
    for result in results:
        kept = first.get(result[name]["cluster"], first[0])[name]["state"]
        now = result[name]["state"]
        assert result[name]["step"] == STOP
        assert 0 < result[name]["read"] <= 1.1 * result[name]["kept"], result[name]["read"]
        assert {"anchor", "momentum"} <= kept.keys() == now.keys()
        assert ("residual" in kept) == (name == "coded")
        for buffer in kept:
            if buffer != "residual" or not is_other_number:
                assert now[buffer] == kept[buffer], buffer
            assert any(value for places in kept[buffer].values() for value in places.values())
        assert result[name]["anchor"] == ended[0] != kept["anchor"]


REFUSED = {
    "not converted": r"other pipeline stages, .* convert it in every cluster: python -m deepspeed",
    "in flight": r"holds [1-4] transfer\(s\) in flight, .* call engine\.dsx\.finish\(\)",
    "no ZeRO": r"other pipeline stages, .*; resume with the same stages, or export the model",
    "0 to 1": r"pipeline with ZeRO-0, and this one has zero_optimization.stage=1: .* export",
    "1 to 0": r"pipeline with ZeRO-1, and this one has zero_optimization.stage=0: .* export",
    "model": r"belongs to another model: it lacks tied_modules\.ends\.shift, tied_modules\.ends\.",
}


@pytest.mark.ci
def test_one_stage_goes_on_where_two_were(tmp_path: Path) -> None:
    """Two ranks of one stage take over from two stages of one rank."""
    base = str(tmp_path)
    first = run_distributed(save, 4, base, 2, ("coded", "streamed"), timeout_seconds=150)
    second = run_distributed(resume, 4, base, 1, 2, ("coded",), True, timeout_seconds=150)
    check({0: first[0], 1: first[2]}, second, "coded")
    for result in second:
        for case, message in REFUSED.items():
            assert re.search(message, result["refused"][case]), result["refused"][case]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_other_stages_and_other_clusters(tmp_path: Path) -> None:
    base, names = str(tmp_path), ("coded", "drained", "sizes")
    first = run_distributed(save, 4, base, 2, names, timeout_seconds=500)
    saved = {0: first[0], 1: first[2]}
    for num_ranks, num_stages, num_clusters in ((6, 3, 2), (4, 1, 4), (4, 2, 1)):
        results = run_distributed(
            resume, num_ranks, base, num_stages, num_clusters, names, timeout_seconds=500
        )
        for name in names:
            check(saved, results, name, num_clusters != 2)
        for result in results if num_stages == 3 else ():  # the same batches: the same training
            for parameter, values in saved[result["sizes"]["cluster"]]["sizes"]["weights"].items():
                assert result["sizes"]["weights"][parameter] == pytest.approx(values, abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_stages_go_on_where_one_was(tmp_path: Path) -> None:
    base, names = str(tmp_path), ("coded", "sizes")
    first = run_distributed(save, 2, base, 1, names, timeout_seconds=500)
    results = run_distributed(resume, 4, base, 2, 2, names, timeout_seconds=500)
    for name in names:
        check({0: first[0], 1: first[1]}, results, name)
