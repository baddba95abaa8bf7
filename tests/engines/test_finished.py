"""What is saved at or after finish() is the finished model, and training goes on from it."""

from __future__ import annotations

import contextlib
import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import dsx
from tests.distributed import run_distributed
from tests.engines import pipelines
from tests.engines.engines import Kind, build_engine, engine_arguments, quiet, train_step, weights
from tests.installed import needs
from tests.tiny import CASES, TinyNet, mean_loss

LAST, MORE = 6, 12  # of H = 4: fragments are in flight at the end
ZERO_1 = Kind(1, "fp32", "two", "adamw")
KINDS = [
    ZERO_1,
    Kind(0, "bf16", "two", "adamw"),
    Kind(2, "bf16", "two", "adamw"),
    Kind(3, "fp32", "two", "adamw", zero=("none_persistent",)),
    Kind(1, "bf16", "two", "adamw", "eager"),
]
PIPELINE = pipelines.Kind(1, is_tied=True, optimizer="adamw")


class Engines:
    """One kind of engine of DeepSpeed's, with and without dsx."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.is_pipeline = isinstance(kind, pipelines.Kind)
        self.train = pipelines.train_batch if self.is_pipeline else train_step

    def arguments(self) -> dict[str, Any]:
        arguments = pipelines.engine_arguments if self.is_pipeline else engine_arguments
        return arguments(self.kind)

    def build(self) -> Any:
        return pipelines.build_pipeline(self.kind) if self.is_pipeline else build_engine(self.kind)

    def build_alone(self) -> Any:
        import deepspeed

        arguments = self.arguments()
        config = {key: value for key, value in arguments.pop("config").items() if key != "dsx"}
        with contextlib.redirect_stdout(io.StringIO()):
            return deepspeed.initialize(config=config, dist_init_required=False, **arguments)[0]


def plain(engine: Any) -> dict[str, Any]:
    return {name: weight.numpy() for name, weight in weights(engine).items()}


def are_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all((ours[n] == theirs[n]).all() for n in theirs)


def finish_and_go_on(kind: Any, base: str) -> dict[str, Any]:
    quiet()
    engines = Engines(kind)
    engine = engines.build()
    for step in range(1, LAST + 1):
        engines.train(engine, step)
    engine.save_checkpoint(base, tag="before", client_state={"mine": 1})
    engine.dsx.finish()
    own = plain(engine)
    engine.save_checkpoint(base, tag="after")
    has_own = are_equal(plain(engine), own)
    with engine.dsx.averaged():
        average = plain(engine)
    for step in range(LAST + 1, MORE + 1):
        engines.train(engine, step)
    gone_on = plain(engine)
    cluster, is_finished = engine.dsx.cluster_id, engine.dsx.is_finished
    engine.dsx.close()
    engine.destroy()

    alone = engines.build_alone()
    in_files = []
    for tag in ("before", "after"):
        alone.load_checkpoint(f"{base}/cluster_{cluster}", tag)
        in_files.append(are_equal(plain(alone), average))
    alone.destroy()

    resumed = engines.build()
    _, state = resumed.load_checkpoint(base, tag="before")
    loaded = are_equal(plain(resumed), own)
    resumed.save_checkpoint(base, tag="copy")  # of a run that is finished: it still is
    for step in range(LAST + 1, MORE + 1):
        engines.train(resumed, step)
    results = {
        "average": average,
        "average is another": kind.preset == "eager" or not are_equal(average, own),
        "own is back": has_own,
        "in the files": in_files,
        "loaded": loaded,
        "client state": state["mine"],
        "goes on": are_equal(plain(resumed), gone_on),
        "is finished": [is_finished, resumed.dsx.is_finished],
    }
    resumed.dsx.close()
    resumed.destroy()
    alone = engines.build_alone()
    alone.load_checkpoint(f"{base}/cluster_{cluster}", "copy")
    results["copied"] = are_equal(plain(alone), average)
    return results


def finish_all(kinds: list[Any], base: str) -> list[dict[str, Any]]:
    return [finish_and_go_on(kind, f"{base}/{index}") for index, kind in enumerate(kinds)]


@needs("deepspeed")
@pytest.mark.parametrize(
    "kinds",
    [[ZERO_1], pytest.param([*KINDS[1:], PIPELINE], marks=pytest.mark.ci)],
    ids=["one", "all"],
)
def test_deepspeed_s_files_hold_the_finished_model(kinds: list[Any], tmp_path: Path) -> None:
    everyone = run_distributed(finish_all, 4, kinds, str(tmp_path), timeout_seconds=280)
    for index, kind in enumerate(kinds):
        ranks = [results[index] for results in everyone]
        averages = [result.pop("average") for result in ranks]
        for rank, result in enumerate(ranks):
            assert are_equal(averages[rank], averages[rank % 2]), kind  # that of cluster 0
            assert result == {
                "average is another": True, "own is back": True, "in the files": [True, True],
                "loaded": True, "client state": 1, "goes on": True, "is finished": [False, False],
                "copied": True,
            }, kind  # fmt: skip


def finish_in_plain_torch(name: str, base: str) -> dict[str, Any]:
    case = CASES[name]
    clusters = {"num_clusters": 2, "deadline_seconds": 20}
    config = {"dsx": {"preset": case.preset, "clusters": clusters, **case.overrides}}
    world = dsx.init_distributed(config)
    log = io.StringIO()
    logging.getLogger("dsx").addHandler(logging.StreamHandler(log))
    folder = Path(base) / f"{world.cluster_id}"

    def attach() -> tuple[TinyNet, torch.optim.Optimizer, dsx.Handle]:
        model = TinyNet(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, dsx.attach(model, optimizer, config=config)

    def train(model: TinyNet, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last + 1):
            optimizer.zero_grad()
            mean_loss(model, world.cluster_id, step).backward()
            optimizer.step()

    def state_of(model: TinyNet) -> dict[str, Any]:
        return {name: value.numpy().copy() for name, value in model.state_dict().items()}

    def save_once_more(name: str) -> None:
        with handle.saving():
            saved_again[name] = state_of(model)

    saved_again: dict[str, Any] = {}
    model, optimizer, handle = attach()
    train(model, optimizer, 1, LAST)
    handle.save(folder / "before")
    if world.cluster_id == 0:  # the other one has nothing that could be written again
        handle.save(folder / "alone", lambda: save_once_more("alone"))
    handle.finish()
    own = state_of(model)
    try:
        handle.save(folder / "outside")
        refused = "served"
    except RuntimeError as error:
        refused = str(error)
    with handle.saving():
        handle.save(folder / "after")
        torch.save([model.state_dict(), optimizer.state_dict()], folder / "after" / "mine.pt")
    kept = torch.load(folder / "after" / "mine.pt")
    with handle.averaged():
        average = state_of(model)
    results = {
        "average": average,
        "average is another": name != "streaming_diloco" or not are_equal(average, own),
        "in the file": are_equal({n: v.numpy() for n, v in kept[0].items()}, average),
        "own is back": are_equal(state_of(model), own),
        "saved again": world.cluster_id > 0 or are_equal(saved_again["alone"], average),
    }
    train(model, optimizer, LAST + 1, MORE)
    expected = state_of(model)
    handle.close()
    model, optimizer, handle = attach()
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    handle.load(folder / "after")
    results["loaded"] = are_equal(state_of(model), own)
    train(model, optimizer, LAST + 1, MORE)
    results["goes on"] = are_equal(state_of(model), expected)
    handle.close()
    return {**results, "refused": refused, "log": log.getvalue()}


@pytest.mark.ci
@pytest.mark.parametrize("name", ["diloco_delayed", "streaming_diloco"])
def test_plain_torch_saves_the_finished_model(name: str, tmp_path: Path) -> None:
    everyone = run_distributed(finish_in_plain_torch, 2, name, str(tmp_path), engine=None)
    averages = [result.pop("average") for result in everyone]
    assert are_equal(*averages)
    for cluster, result in enumerate(everyone):
        refused, log = result.pop("refused"), result.pop("log")
        assert result == dict.fromkeys(result, True)
        assert "after finish() a checkpoint holds the finished model" in refused
        assert f"{tmp_path}/{cluster}/before was saved at this step before finish()" in log
