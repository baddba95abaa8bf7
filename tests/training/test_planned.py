"""A run that is not the one its block was planned for says so; one that is says nothing."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dsx
from dsx.config.schema import load_config
from dsx.core.types import ParameterShape, Stage
from dsx.training.planned import tell_of_plan
from tests.bench.test_dry_run_seconds import LARGE, document, flags_of, module
from tests.distributed import run_distributed
from tests.engines.engines import quiet
from tests.installed import needs

RANKS = 2
KINDS = ["ZeRO-1", "ZeRO-3", "pipeline"]


def say_at_the_start(kind: str, plan: dict[str, Any]) -> list[str]:
    """What a rank of a run of one cluster warns of."""
    quiet()
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setLevel(logging.WARNING)
    logging.getLogger("dsx.training.planned").addHandler(handler)
    config = document(kind)
    config["dsx"] |= {"clusters": {"num_clusters": 1}, "plan": plan}
    dsx.init_distributed(config)
    model = module(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = dsx.initialize(model=model, config=config, optimizer=optimizer)[0]
    engine.dsx.close()
    engine.destroy()
    return stream.getvalue().splitlines()


def said(kind: str, plan: dict[str, Any]) -> list[str]:
    """What the ranks together warn of."""
    found = run_distributed(say_at_the_start, RANKS, kind, plan, timeout_seconds=120)
    return [line for of_rank in found for line in of_rank]


@pytest.mark.parametrize("tells_model", [False, True])
def test_a_run_whose_own_flags_tell_the_model_is_not_compared(
    tells_model: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A slice of a tensor-parallel rank, whose other slices the JSON knows nothing of."""
    sizes = tmp_path / "sizes.flags"
    sizes.write_text(flags_of(LARGE))
    block = {"preset": "diloco", "clusters": {"num_clusters": 2}, "plan": {"model": str(sizes)}}
    shape = ParameterShape("weight.slice_0", (8, 8))
    adapter: Any = SimpleNamespace(stage=Stage(), fragment_parameters=[[shape]])
    adapter.tells_model = tells_model
    world: Any = SimpleNamespace(rank=0, world_size=2)
    tell_of_plan(adapter, world, load_config({"dsx": block}))
    assert any("and the run trains 64" in line for line in caplog.messages) != tells_model


@needs("megatron")
def test_megatrons_flags_tell_its_model() -> None:
    from dsx.engines.megatron.engine import MegatronAdapter

    assert MegatronAdapter.tells_model


@needs("deepspeed")
@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_as_planned_says_nothing_and_another_says_what_differs(
    kind: str, tmp_path: Path
) -> None:
    sizes = tmp_path / "sizes.flags"
    sizes.write_text(flags_of(LARGE))
    assert said(kind, {"model": str(sizes), "ranks_per_cluster": RANKS}) == []
    sizes.write_text(flags_of(LARGE).replace("--vocab-size 4096", "--vocab-size 8192"))
    ranks, model = said(kind, {"model": str(sizes), "ranks_per_cluster": 8})
    assert "dsx.plan.ranks_per_cluster=8, and this cluster has 2 ranks" in ranks
    own = int(model.partition("and the run trains ")[2].partition(":")[0])
    of_embedding = 4096 * LARGE.hidden * (1 if kind == "pipeline" else 2)  # of a stage, with a head
    assert f" has {own + of_embedding} parameters" in model
    assert ("in the first pipeline stage" in model) == (kind == "pipeline")


@needs("deepspeed")
@pytest.mark.ci
def test_a_file_that_is_not_there_is_passed_over_and_one_that_is_none_is_told(
    tmp_path: Path,
) -> None:
    assert said("ZeRO-1", {"model": str(tmp_path / "gone.flags")}) == []
    assert said("ZeRO-1", {"model": "x" * 300}) == []  # no name of a file
    (tmp_path / "other.flags").write_text("--hidden-size 64")
    (line,) = said("ZeRO-1", {"model": str(tmp_path / "other.flags")})
    assert "is not compared with the run: the flags lack --num-layers" in line
