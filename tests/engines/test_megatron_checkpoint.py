"""Outer state beside Megatron's torch_dist checkpoints: bit for bit, or an error that says why."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dsx.checkpoint.checksums import of_manifest
from tests.distributed import run_by_parts, run_distributed
from tests.engines.megatrons import (
    Engine,
    Kind,
    build_engine,
    build_inner,
    config_of,
    join,
    needs_megatron,
    train_step,
    whole_weights,
)

pytestmark = needs_megatron

STOP, END = 7, 13  # a fragment is in flight at the stop
RESUMED = [
    Kind(pipeline=2, is_tied=True),
    Kind(is_sharded=True, precision="bf16", preset="dreamddp"),
]

RESUMED_TOO = [
    Kind(is_sharded=True, precision="bf16"),
    Kind(is_sharded=True, precision="bf16", preset="cocktail_sgd", ffn=64),
    Kind(pipeline=2, preset="overlap_local_sgd"),
    Kind(tensor=2, precision="bf16", optimizer="muon"),
    Kind(pipeline=2, is_tied=True, optimizer="muon"),
    Kind(context=2, is_sharded=True, precision="bf16"),
    Kind(context=2),
    Kind(experts=4, expert_parallel=2, is_sharded=True, precision="bf16"),
    Kind(experts=4, expert_parallel=2),
    Kind(
        tensor=2, experts=4, expert_parallel=2, expert_tensor=1, is_sharded=True, precision="bf16"
    ),
    Kind(experts=4, is_biased=True, is_sharded=True, precision="bf16"),
    Kind(experts=4, is_biased=True, tensor=2, precision="bf16"),
]


def state_of(engine: Engine) -> dict[str, Any]:
    handle = engine.handle
    weights = {name: w.numpy() for name, w in whole_weights(engine).items()}
    anchors = {str(i): a.numpy().copy() for i, a in enumerate(handle.loop.state.anchor)}
    return {**weights, **anchors}


def are_equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


def save(engine: Engine, base: Path, iteration: int) -> None:
    from megatron_files import save_checkpoint

    from dsx.engines.megatron.checkpoint import save_outer_state

    save_outer_state(engine.handle, iteration, base)
    directory = base / f"megatron_{engine.handle.cluster_id}"
    save_checkpoint(directory, iteration, engine.chunks, engine.optimizer)


def train(engine: Engine, first: int, last: int) -> None:
    for step in range(first, last + 1):
        train_step(engine, step)


def resume_kind(kind: Kind, base: Path) -> dict[str, Any]:
    """Save in the middle of a run, go on; then start anew from the files, in both ways."""
    from megatron_files import load_checkpoint

    from dsx.engines.megatron.checkpoint import load_outer_state

    world = join()
    directory = base / f"megatron_{world.cluster_id}"
    engine = build_engine(kind)
    train(engine, 1, STOP)
    save(engine, base, 100 + STOP)  # Megatron's count need not be that of dsx
    in_flight = len(engine.handle.loop.in_flight)
    train(engine, STOP + 1, END)
    expected = state_of(engine)
    engine.handle.close()

    attached = build_engine(kind, seed=5)  # attached before Megatron loads
    iteration = load_checkpoint(directory, attached.chunks, attached.optimizer)
    load_outer_state(attached.handle, iteration, base)
    train(attached, STOP + 1, END)
    is_equal = [are_equal(state_of(attached), expected)]
    attached.handle.close()

    loaded = build_inner(kind, seed=6)  # loaded before it is attached, as pretrain scripts do
    iteration = load_checkpoint(directory, loaded.chunks, loaded.optimizer)
    attach(loaded, base, iteration)
    train(loaded, STOP + 1, END)
    is_equal.append(are_equal(state_of(loaded), expected))
    loaded.handle.close()
    return {
        "in_flight": in_flight,
        "step": engine.handle.step,
        "equal": is_equal,
        "is_coded": any(f.coded_runs for f in engine.handle.loop.adapter.fragments),
    }


def attach(engine: Engine, base: Path, iteration: int) -> None:
    import dsx

    dsx.attach_megatron(
        engine.chunks, engine.optimizer, config=config_of(engine.kind), resume=(base, iteration)
    )
    assert engine.handle.loop.beginning.begun.bytes_sent == 0  # each cluster has loaded its own


def message_of(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except (ValueError, FileNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    return "served"


def try_foreign(base: Path) -> dict[str, str]:
    """What must not be resumed from, after `resume_kind` of the first kind."""
    from dsx.engines.megatron.checkpoint import load_outer_state

    world, iteration = join(), 100 + STOP
    engine = build_engine(RESUMED[0], seed=7)  # other weights than were saved

    def load(directory: Path, number: int = iteration) -> str:
        return message_of(load_outer_state, engine.handle, number, directory)

    messages = {
        "other weights": load(base),
        "no such iteration": load(base, 3),
        "different iterations": load(base, iteration + world.cluster_id),
        "nothing there": load(base / "nowhere"),
    }
    copies = {name: base.parent / name for name in ("one rank", "other run")}
    is_writer = world.cluster_id == 0 and world.rank == 0
    if is_writer:
        for copy in copies.values():
            shutil.copytree(base / "dsx", copy / "dsx")
        tag = Path("dsx") / "cluster_1" / f"iter_{iteration:07d}"
        (copies["one rank"] / tag / "dsx_rank_00001.safetensors").unlink()
        manifest = copies["other run"] / tag / "dsx.json"
        told = {**json.loads(manifest.read_text()), "session": "another"}
        del told["checksum"]
        manifest.write_text(json.dumps(told | {"checksum": of_manifest(told)}))
    engine.handle.gather(None)
    messages["other run"] = load(copies["other run"])
    engine.handle.close()
    loaded = build_inner(RESUMED[0], seed=6)
    from megatron_files import load_checkpoint

    directory = base / f"megatron_{world.cluster_id}"
    load_checkpoint(directory, loaded.chunks, loaded.optimizer)
    messages["one rank"] = message_of(attach, loaded, copies["one rank"], iteration)
    return messages


@contextmanager
def having_children() -> Iterator[None]:
    """Let dist_checkpointing start processes of its own, which a daemon may not."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for child in multiprocessing.active_children():  # which it leaves behind
            child.kill()


def resume_kinds(base: str, kinds: list[Kind]) -> list[dict[str, Any]]:
    with having_children():
        join()
        results = [resume_kind(kind, Path(base) / str(kind)) for kind in kinds]
        dist.barrier()
        return results


def run(base: str) -> dict[str, Any]:
    with having_children():
        results = resume_kinds(base, RESUMED)
        return {"resumed": results, "foreign": try_foreign(Path(base) / str(RESUMED[0]))}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    base = tmp_path_factory.mktemp("megatron")
    return run_distributed(run, 4, str(base), timeout_seconds=290, engine="megatron")


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_resume_of_further_kinds_is_bit_for_bit(tmp_path: Path) -> None:
    """Among them random top-k, whose rest the local model keeps."""
    ranks = run_by_parts(
        resume_kinds, 4, str(tmp_path), of=RESUMED_TOO, timeout_seconds=290, engine="megatron"
    )
    for results in ranks:
        assert [result["is_coded"] for result in results] == [
            k.preset == "cocktail_sgd" for k in RESUMED_TOO
        ]
        for result in results:
            assert result["in_flight"] and result["step"] == END
            assert result["equal"] == [True, True]


@pytest.mark.parametrize("kind", RESUMED, ids=str)
def test_resume_is_bit_for_bit(kind: Kind, outcomes: list[dict[str, Any]]) -> None:
    results = [rank["resumed"][RESUMED.index(kind)] for rank in outcomes]
    is_applied_at_once = kind.preset == "dreamddp"
    assert any(result["in_flight"] for result in results) != is_applied_at_once
    for result in results:
        assert result["step"] == END
        assert all(result["equal"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("other weights", "the masters that Megatron has loaded on pipeline stage"),
        ("no such iteration", "no complete checkpoint 'iter_0000003' that all clusters hold"),
        ("different iterations", "loaded different iterations (cluster 0: 107, cluster 1: 108)"),
        ("nothing there", "no complete checkpoint 'iter_0000107'"),
        ("one rank", "cluster 1: no outer state at "),
        ("other run", "no complete checkpoint 'iter_0000107' that all clusters hold"),
    ],
)
def test_what_is_missing_or_foreign_is_an_error_on_every_rank(
    name: str, text: str, outcomes: list[dict[str, Any]]
) -> None:
    for rank in outcomes:
        assert text in rank["foreign"][name]
