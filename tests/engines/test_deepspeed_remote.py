"""DeepSpeed's checkpoints at a remote place: gone on from on machines that have none."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dsx.checkpoint.remote import Remote
from dsx.checkpoint.tags import complete_tags
from tests.distributed import run_distributed
from tests.engines.engines import build_engine, ds_config, quiet, train_step
from tests.engines.test_deepspeed_resharding import end
from tests.installed import needs

pytestmark = [needs("deepspeed", "fsspec"), pytest.mark.ci]
KIND = (1, "fp32", "one", "adamw", "streaming_diloco")
LAST = 14


def new_engine(base: str, folder: str) -> Any:
    config = ds_config(1, "fp32", "streaming_diloco")["dsx"]
    config |= {"checkpoints": {"remote": f"file://{base}/far"}}
    config |= {"metrics": {"dir": f"{base}/{folder}/run"}}
    return build_engine(KIND, dsx=config)


def trained(engine: Any) -> list[Any]:
    return [p.detach().float().numpy().copy() for p in engine.module.parameters()]


def train(base: str) -> list[Any]:
    """Save at steps 3 and 8 and train to the end, and no further than what is copied then."""
    engine = new_engine(base, "near")
    for step in range(1, LAST + 1):
        train_step(engine, step)
        if step in (3, 8):
            assert engine.save_checkpoint(f"{base}/near", tag=f"step{step}")
    engine.dsx.finish()
    weights = trained(engine)
    end(engine)
    return weights


def go_on(base: str) -> dict[str, Any]:
    """Load on a machine that has nothing, by name and without, and where one cluster has it."""
    quiet()
    whole = train(base)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dsx").addHandler(handler)
    engine = new_engine(base, "other")
    handle, first = engine.dsx, engine.global_rank == 0
    own = Path(base) / "other" / f"cluster_{handle.cluster_id}"
    ends, steps = list[bool](), list[int]()
    for tag in (None, "step3", None):
        engine.load_checkpoint(f"{base}/other", tag=tag)
        steps.append(handle.step)
        for step in range(handle.step + 1, LAST + 1):
            train_step(engine, step)
        handle.finish()
        ends.append(all((a == b).all() for a, b in zip(trained(engine), whole, strict=True)))
        if tag is not None and first and handle.cluster_id == 1:
            shutil.rmtree(own / "step8")  # which only the other one has now
        torch.distributed.barrier()
    there = sorted(complete_tags(own))
    errors: list[str] = []
    for name in ("damaged", "unreachable"):
        if name == "damaged" and first and handle.cluster_id == 0:
            state = Path(base) / "far" / "cluster_0" / "step8" / "dsx_rank_00001.safetensors"
            content = bytearray(state.read_bytes())
            content[-1] ^= 1
            state.write_bytes(content)
        if name == "unreachable":
            handle.remote._files = None  # raises an AttributeError, as no file system would
        torch.distributed.barrier()
        handle.gather(None)
        try:
            path, _ = engine.load_checkpoint(f"{base}/{name}")
            errors.append(str(path))
        except ValueError as error:
            errors.append(str(error))
    end(engine)
    left = [str(path) for path in Path(base).rglob("*.unfinished")]
    told = {"steps": steps, "ends": ends, "there": there, "errors": errors}
    return {**told, "said": said, "left": left}


def test_a_run_goes_on_where_there_is_nothing_on_the_disk(tmp_path: Path) -> None:
    results = run_distributed(go_on, 4, str(tmp_path), timeout_seconds=280)
    remote = Remote(f"file://{tmp_path}/far", "here")
    assert [sorted(remote.tags(m)) for m in range(2)] == [["step3", "step8"]] * 2
    about = json.loads((tmp_path / "near" / "run" / "run.json").read_text())
    assert [one["copied_to"] for one in about["checkpoints"]] == [
        f"file://{tmp_path}/far/cluster_0/step{step}" for step in (3, 8)
    ]
    records = (tmp_path / "near" / "run" / "metrics.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in records]
    assert kinds.count("copied") >= 1 and "not_copied" not in kinds
    for rank, told in enumerate(results):
        assert told["steps"] == [8, 3, 8] and told["there"] == ["step3", "step8"]
        assert told["left"] == []
        assert told["ends"] == [True, True, True]
        fetched = [line for line in told["said"] if "is fetched" in line]
        assert len(fetched) == [4, 0, 5, 0][rank], fetched
        damaged, unreachable = told["errors"]
        assert f"/damaged/cluster_{rank // 2}/step3/" in damaged
        assert "no complete checkpoint" in unreachable
        assert "cluster 0: " in unreachable and "/far cannot be read" in unreachable
