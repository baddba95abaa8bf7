"""Megatron's checkpoint after finish() is the averaged model; a run goes on from its own one."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from dsx.checkpoint.weight_files import DTYPES
from dsx.engines.export import ExportOptions, export_checkpoint
from tests.distributed import run_distributed
from tests.engines.megatrons import (
    Engine,
    Kind,
    build_engine,
    build_inner,
    join,
    needs_megatron,
    whole_weights,
)
from tests.engines.test_megatron_checkpoint import are_equal, attach, state_of, train

pytestmark = needs_megatron

LAST, MORE = 7, 12  # fragments are in flight at the end
KINDS = [Kind(pipeline=2, is_tied=True), Kind(tensor=2, precision="bf16")]
SHARDED = Kind(is_sharded=True, precision="bf16")


def plain(engine: Engine) -> dict[str, Any]:
    return {name: weight.float().numpy() for name, weight in whole_weights(engine).items()}


def finish_and_go_on(kind: Kind, base: Path) -> dict[str, Any]:
    from megatron_files import load_checkpoint, save_checkpoint

    from dsx.engines.megatron.checkpoint import save_outer_state

    world = join()
    directory = base / f"megatron_{world.cluster_id}"
    engine = build_engine(kind)
    train(engine, 1, LAST)
    engine.handle.finish()
    own = plain(engine)
    try:
        save_outer_state(engine.handle, LAST, base)
        refused = "served"
    except RuntimeError as error:
        refused = str(error)
    with engine.handle.saving():
        save_outer_state(engine.handle, LAST, base)
        save_checkpoint(directory, LAST, engine.chunks, engine.optimizer)
        average = plain(engine)
    results = {"average is another": not are_equal(average, own)}
    results["own is back"] = are_equal(plain(engine), own)
    train(engine, LAST + 1, MORE)
    expected = state_of(engine)
    engine.handle.close()

    alone = build_inner(kind, seed=6)
    load_checkpoint(directory, alone.chunks, alone.optimizer)
    results["in the files"] = are_equal(plain(alone), average)
    attach(alone, base, LAST)
    results["loaded"] = are_equal(plain(alone), own)
    train(alone, LAST + 1, MORE)
    results["goes on"] = are_equal(state_of(alone), expected)
    alone.handle.close()
    out = base / f"out_{dist.get_rank()}_{world.cluster_id}"
    options = ExportOptions(base / "dsx", out, "safetensors", None, "fp32", 5.0)
    export_checkpoint(options, lambda line: None)
    exported = {
        name.removeprefix("decoder."): tensor.to(DTYPES[kind.precision]).float().numpy()
        for name, tensor in load_file(out / "model.safetensors").items()  # as `whole_weights` does
    }
    results["exported"] = are_equal(exported, average)
    return {**results, "average": average, "refused": refused}


def finish_all(kinds: list[Kind], base: str) -> list[dict[str, Any]]:
    # dist_checkpointing starts processes of its own, which a daemon may not
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    try:
        results = [finish_and_go_on(kind, Path(base) / str(i)) for i, kind in enumerate(kinds)]
        dist.barrier()
        return results
    finally:
        for child in multiprocessing.active_children():  # and leaves them behind
            child.kill()


@pytest.mark.ci
@pytest.mark.parametrize("kinds", [[SHARDED], KINDS], ids=["sharded", "others"])
def test_megatron_s_checkpoint_holds_the_finished_model(kinds: list[Kind], tmp_path: Path) -> None:
    everyone = run_distributed(
        finish_all, 4, kinds, str(tmp_path), timeout_seconds=280, engine="megatron"
    )
    for index, kind in enumerate(kinds):
        ranks = [results[index] for results in everyone]
        averages = [result.pop("average") for result in ranks]
        for rank, result in enumerate(ranks):
            assert are_equal(averages[rank], averages[rank % 2]), kind  # that of cluster 0
            assert "inside `with handle.saving():`" in result.pop("refused")
            assert result == dict.fromkeys(result, True), kind
