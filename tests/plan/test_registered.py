"""What is registered from outside is planned for like what ships, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import dsx
from dsx.cli import app
from dsx.compress.averaging import CodedMean
from dsx.compress.base import Compressor, Launch
from dsx.compress.slices import Rounds, gathered_rounds
from dsx.compress.wire.formats import BF16
from dsx.core import registry
from dsx.core.exchange import Exchange
from dsx.core.membership import Seat
from dsx.core.types import Fragment, History, SyncParams
from dsx.method import Blocking, Method, Momentum, Periodic, WholeModel
from dsx.plan.link import Link
from dsx.plan.model_files import read_model
from dsx.plan.predict import predict
from dsx.plan.traffic import one_rank
from tests.plan.test_payload import Net, events_of, shapes_of

SIZES = "--params 1e9 --layers 8 --gpus-per-cluster 1 --clusters 3 --step-seconds 1 --gbps 1"


class HalvedChannel:
    """All of a fragment in bf16, to everybody."""

    spectrum: Tensor | None = None

    def __init__(self, numel: int, seat: Seat) -> None:
        self.slots: Mapping[str, Tensor] = {}
        self.errors: Mapping[str, object] = {}
        self._mean = CodedMean(numel, BF16(), BF16(), seat, is_gathered=True)

    def exchange(self, x: Tensor, launch: Launch) -> Exchange:
        return self._mean.exchange(x)


@pytest.fixture
def outsiders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    known = {kind: dict(names) for kind, names in registry._known.items()}
    monkeypatch.setattr(registry, "_known", known)

    @dsx.register("compression")
    @dataclass(frozen=True)
    class Halved(Compressor):
        def open(self, fragment: Fragment, seat: Seat, max_rank: int) -> HalvedChannel:
            return HalvedChannel(fragment.numel, seat)

        def traffic(
            self, fragment: Fragment, num_clusters: int, launch: Launch, shard: int = 0
        ) -> Rounds:
            return gathered_rounds(fragment.numel, BF16(), num_clusters)

    @dsx.register("delay", "patient")
    @dataclass(frozen=True)
    class Patient(Blocking):
        rounds_under_way = 1

        def is_ripe(self, age: int, newer: int) -> bool:
            return newer >= 1

    @dsx.register("schedule", "whimsical")
    @dataclass(frozen=True)
    class Whimsical(Periodic):
        def due(
            self, step: int, history: History, sync_params: SyncParams, stage: object
        ) -> Sequence[int]:
            return ()

    @dsx.register("preset")
    def halves(num_clusters: int) -> Method:
        return Method(
            WholeModel(), Periodic(40), Blocking(), Momentum(1.0, 0.5), compression=Halved()
        )

    @dsx.register("preset")
    def waits(num_clusters: int) -> Method:
        return Method(WholeModel(), Periodic(40), Patient(), Momentum(0.5, 0.5))

    @dsx.register("preset")
    def moods(num_clusters: int) -> Method:
        return Method(WholeModel(), Whimsical(40), Blocking(), Momentum(1.0, 0.5))

    yield


@pytest.mark.usefixtures("outsiders")
def test_presets_from_outside_are_ranked_and_offered() -> None:
    result = CliRunner().invoke(app, ["plan", *SIZES.split(), "--target", "50", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    rows = {row["preset"]: row for row in found["candidates"]}
    assert rows["halves"]["codec"] == "halved"
    assert rows["halves"]["bytes_per_round"] == pytest.approx(2 * 2 * 1e9, rel=1e-6)
    assert rows["waits"]["rounds_late"] == 1
    assert rows["waits"]["interval"] < rows["slowmo"]["interval"]
    assert (
        rows["waits"]["outer_memory"]["transfers"]
        == 2 * rows["slowmo"]["outer_memory"]["transfers"]
    )
    for name in ("halves", "waits"):
        method = dsx.load_config({"dsx": rows[name]["dsx"]}).method
        assert method.schedule.interval == rows[name]["interval"]


@pytest.mark.usefixtures("outsiders")
def test_a_schedule_of_which_nothing_is_known_is_refused_by_name() -> None:
    result = CliRunner().invoke(app, ["plan", *SIZES.split(), "--target", "50"])
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("moods")]
    assert "moods is left out: schedule Whimsical: a plan knows when Periodic" in line
    with pytest.raises(ValueError, match="schedule Whimsical: a plan knows when"):
        predict(dsx.preset("moods"), one_rank(WholeModel(), shapes_of(Net())), 1.0, Link(1e9), 2)


@pytest.mark.usefixtures("outsiders")
@pytest.mark.parametrize("num_clusters", [2, 4])
def test_what_a_codec_from_outside_declares_is_what_a_run_sends(num_clusters: int) -> None:
    method = dsx.preset("halves", num_clusters, schedule={"interval": 5})
    ranks = one_rank(method.fragments, shapes_of(Net()))
    predicted = predict(method, ranks, 1.0, Link(1e9), num_clusters).bytes_by_cluster
    for cluster, events in enumerate(events_of(method, num_clusters, 10)):
        assert [event["bytes_sent"] for event in events] == [predicted[cluster]] * 2
    torch.manual_seed(0)
    dense = replace(method, compression=dsx.preset("diloco").compression)
    assert predict(dense, ranks, 1.0, Link(1e9), num_clusters).bytes_by_cluster != predicted


AFTER = "dsx.schedule.when='after' takes a layer's optimizer step inside the backward, where "
GRAPH = "dsx does not serve --enable-cuda-graph of Megatron with dsx.schedule.type='layerwise'"


@pytest.mark.parametrize(
    ("engine", "flags", "left_out"),
    [
        ("Megatron", "", {"steps_inside": f"{AFTER}Megatron has not reduced"}),
        ("Megatron", "--enable-cuda-graph", {"steps_inside": AFTER, "dreamddp": GRAPH}),
        ("DeepSpeed", "", {"steps_inside": f"{AFTER}DeepSpeed has not reduced"}),
    ],
)
def test_what_an_engine_refuses_is_left_out_by_name(
    engine: str, flags: str, left_out: dict[str, str], outsiders: None, tmp_path: Path
) -> None:
    @dsx.register("preset")
    def steps_inside(num_clusters: int) -> Method:
        return dsx.preset("dreamddp", num_clusters, schedule={"when": "after"})

    (tmp_path / "model.flags").write_text(
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
        f"--vocab-size 256 --bf16 {flags}"
    )
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    model = ["--megatron", str(tmp_path / "model.flags")]
    if engine == "DeepSpeed":
        model = ["--deepspeed", str(tmp_path / "zero.json"), "--model", model[1]]
        model += ["--gpus-per-cluster", "2"]
    given = "--clusters 2 --gbps 1 --step-seconds 1 --target 50 --json"
    result = CliRunner().invoke(app, ["plan", *model, *given.split()])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    ranked = {row["preset"] for row in found["candidates"]}
    lines = {line.split(" is left out: ")[0]: line for line in found["left_out"]}
    for name, reason in left_out.items():
        assert reason in lines[name] and name not in ranked
    assert ("dreamddp" in ranked) == ("dreamddp" not in left_out)


@pytest.mark.parametrize("batch", ["--global-batch-size 8", "gradient_accumulation_steps"])
def test_micro_batches_are_read_from_the_files(batch: str, tmp_path: Path) -> None:
    flags = tmp_path / "model.flags"
    flags.write_text(
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
        f"--vocab-size 256 --micro-batch-size 2 {batch if batch.startswith('--') else ''}"
    )
    if batch.startswith("--"):
        assert read_model(flags, None, 2).micro_batches == 2
        return
    source = tmp_path / "ds.json"
    source.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, batch: 3}))
    found = read_model(source, flags, 2)
    assert (found.micro_batches, found.batch.sequences_per_step) == (3, 12)


def test_a_preset_that_fails_is_left_out_by_name(outsiders: None) -> None:
    @dsx.register("preset")
    def boom(num_clusters: int) -> Method:
        raise RuntimeError("no clusters today")

    result = CliRunner().invoke(app, ["plan", *SIZES.split(), "--target", "50"])
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("boom")]
    assert "boom is left out: preset='boom' fails with RuntimeError: no clusters today" in line
    with pytest.raises(dsx.ConfigError, match="dsx.preset='boom' fails with RuntimeError: no cl"):
        dsx.preset("boom")
