"""Spans of a run, as a collector in this process has them."""

from __future__ import annotations

import random
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import dsx
from dsx.config.schema import load_config
from dsx.telemetry.exporters.otlp import Spans
from tests.distributed import run_distributed
from tests.installed import needs
from tests.telemetry.exporters.collector import Collector
from tests.tiny import TinyNet, batch

with_otel = needs("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def sync(**more: Any) -> dict[str, Any]:
    return {
        "fragment": 2, "round": 7, "launched_step": 1, "applied_step": 2, "bytes_sent": 99,
        "transfer_seconds": 0.02, "wait_seconds": 0.01, "coding_seconds": 0.005, **more,
    }  # fmt: skip


def one_round(spans: Spans, **more: Any) -> None:
    for step in (1, 2, 3):
        spans.step(step)
        time.sleep(0.05)
    spans.sync(sync(**more))


@with_otel
def test_a_round_has_its_transfer_and_its_wait_below_it() -> None:
    with Collector() as collector:
        spans = Spans(collector.address, 1, "run-a", "diloco")
        before = time.time()
        one_round(spans)
        spans.close()
    assert collector.paths == {"/v1/traces"}
    (whole,), (transfer,), (wait,) = map(collector.of, ("dsx.round", "dsx.transfer", "dsx.wait"))
    assert not whole.parent and transfer.parent == wait.parent == whole.id
    assert whole.trace == transfer.trace == wait.trace
    assert before - 1 < whole.began < whole.ended < time.time() + 1
    assert 0.05 <= whole.ended - whole.began < 5
    assert transfer.began == whole.began and transfer.ended - transfer.began == pytest.approx(
        0.02, abs=1e-6
    )
    assert wait.ended == whole.ended and wait.ended - wait.began == pytest.approx(0.01, abs=1e-3)
    assert whole.facts["dsx.round"] == 7 and whole.facts["dsx.fragment"] == 2
    assert transfer.facts["dsx.bytes_sent"] == 99 and transfer.facts["dsx.coding_seconds"] == 0.005
    assert whole.resource["service.name"] == "dsx" and whole.resource["dsx.cluster"] == 1
    assert not whole.is_error


@with_otel
def test_a_round_is_one_trace_in_all_clusters_and_another_round_another_one() -> None:
    with Collector() as collector:
        for cluster in (0, 1):
            spans = Spans(collector.address, cluster, "run-a", "diloco")
            one_round(spans, refused_by=[1])
            spans.sync(sync(fragment=3))
            spans.sync(sync(launched_step=-5))  # begun before this process
            spans.close()
    whole = collector.of("dsx.round")
    assert [span.facts["dsx.cluster"] for span in whole] == [0, 0, 1, 1]
    assert whole[0].trace == whole[2].trace != whole[1].trace == whole[3].trace
    assert len({span.id for span in collector.spans}) == len(collector.spans) == 12
    assert whole[0].is_error and whole[0].facts["dsx.refused_by"] == [1]
    assert not whole[1].is_error


@with_otel
def test_saves_and_heals() -> None:
    with Collector() as collector:
        spans = Spans(collector.address, 0, "run-a", "diloco")
        spans.saving()
        time.sleep(0.1)
        spans.saved("/c/step4", 4)
        spans.healed(12.5, 1000, 4)
        spans.close()
    (save,), (heal,) = collector.of("dsx.save"), collector.of("dsx.heal")
    assert 0.1 <= save.ended - save.began < 5 and save.facts["dsx.path"] == "/c/step4"
    assert heal.ended - heal.began == pytest.approx(12.5) and heal.facts["dsx.bytes"] == 1000


@with_otel
def test_a_span_of_the_script_has_ours_below_it_and_its_random_numbers_stay() -> None:
    from opentelemetry.sdk.trace import TracerProvider

    random.seed(5)
    wanted = random.random()
    provider = TracerProvider()
    with Collector() as collector:
        spans = Spans(collector.address, 0, "run-a", "diloco")
        with provider.get_tracer("megatron").start_as_current_span("train-step") as theirs:
            random.seed(5)
            one_round(spans)
            assert random.random() == wanted
        spans.close()
    (whole,) = collector.of("dsx.round")
    assert whole.parent == f"{theirs.get_span_context().span_id:016x}"
    assert whole.trace == f"{theirs.get_span_context().trace_id:032x}"


@with_otel
@pytest.mark.parametrize("how", ["refuses", "nobody", "silent"])
def test_a_collector_that_fails_is_told_of_once_and_ends_nothing(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Collector(400) as collector, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if how == "silent":
            silent.listen()
        port = silent.getsockname()[1]
        address = collector.address if how == "refuses" else f"http://127.0.0.1:{port}"
        spans = Spans(address, 0, "run-a", "diloco")
        for _ in range(3):
            began = time.monotonic()
            one_round(spans)
            assert time.monotonic() - began < 1
        began = time.monotonic()
        spans.close()
        assert time.monotonic() - began < 8
    assert not [r for r in caplog.records if r.name.startswith("opentelemetry")]
    told = [record.message for record in caplog.records if record.name.startswith("dsx")]
    assert len(told) <= 2
    if how == "refuses":
        assert told[0].startswith(f"spans do not arrive at {address} (metrics.otlp): ")
        assert "400" in told[0] and told[1] == f"9 of 9 spans have not arrived at {address}"


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "dsx-train\[otel\]"'):
        Spans("http://127.0.0.1:4318", 0, "a", "diloco")


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:4318", "grpc://h:4317", "http://", "http://h:99999", "http://h/?key=a",
     "http://me:pw@h:4318", "http://h h"],
)  # fmt: skip
def test_an_address_that_is_none_is_refused(address: str) -> None:
    metrics = {"otlp": address}
    block = {"preset": "diloco", "clusters": {"num_clusters": 2}, "metrics": metrics}
    with pytest.raises(dsx.ConfigError, match=r'dsx.metrics.otlp=.*"http://127.0.0.1:4318"') as one:
        load_config({"dsx": block})
    assert "pw" not in str(one.value) and "key" not in str(one.value).split("must be")[0]


def train(address: str, folder: str) -> int:
    clusters = {"num_clusters": 2, "deadline_seconds": 60}
    block = {"preset": "streaming_diloco", "clusters": clusters, "metrics": {"otlp": address}}
    config = {"dsx": {**block, "schedule": {"interval": 4}, "fragments": {"num_fragments": 2},
                      "delay": {"steps": 1}}}  # fmt: skip
    world = dsx.init_distributed(config)
    model = TinyNet(world.cluster_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = dsx.attach(model, optimizer, config=config)
    for step in range(1, 13):
        optimizer.zero_grad()
        model(*batch(world.cluster_id, step)).backward()
        optimizer.step()
        if step == 8:
            directory = Path(folder) / f"cluster_{world.cluster_id}"
            directory.mkdir()
            handle.save(directory)
            handle.saved(directory)
    handle.finish()
    handle.close()
    return sum(handle.loop.history.rounds)


@pytest.mark.ci
@with_otel
def test_a_run_of_two_clusters_without_a_folder(tmp_path: Path) -> None:
    with Collector() as collector:
        rounds = run_distributed(train, 2, collector.address, str(tmp_path))
    whole = collector.of("dsx.round")
    by_cluster = [[s for s in whole if s.facts["dsx.cluster"] == m] for m in range(2)]
    assert [len(spans) for spans in by_cluster] == rounds and rounds[0] >= 5
    assert {s.trace for s in by_cluster[0]} == {s.trace for s in by_cluster[1]}
    assert len(collector.of("dsx.transfer")) == len(whole)
    assert len({s.trace for s in whole}) == len(by_cluster[0])
    saves = collector.of("dsx.save")
    assert [s.facts["dsx.step"] for s in saves] == [8, 8]
