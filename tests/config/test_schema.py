"""The "dsx" block: what a preset fills, what overrides it, and how mistakes are answered."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsx.compress.base import Dense
from dsx.compress.quantized import Quantized
from dsx.compress.random_top_k import RandomTopK
from dsx.config.schema import (
    ConfigError,
    load_config,
    preset,
    resolve_method,
    with_launch_arguments,
)
from dsx.method.choices import PRESETS
from dsx.method.control.adaptive_rank import AdaptiveRank
from dsx.method.delay.average import Average
from dsx.method.delay.base import Blocking
from dsx.method.delay.delay_compensation import DelayCompensation
from dsx.method.delay.eager import Eager
from dsx.method.delay.one_step import OneStepDelay
from dsx.method.delay.pullback import Pullback
from dsx.method.delay.shift import Shift
from dsx.method.delay.streaming import StreamingMerge
from dsx.method.fragments import ByLayer, WholeModel
from dsx.method.outer_optimizer import SGD, Adam, Momentum, Nesterov, NoOuterStep
from dsx.method.schedule.adaptive_transmission import AdaptiveTransmission
from dsx.method.schedule.layerwise import Layerwise
from dsx.method.schedule.periodic import Periodic, Streaming
from dsx.method.staleness import GapPenalty

ROOT = Path(__file__).parents[2]


def block(**dsx: Any) -> dict[str, Any]:
    return {"dsx": {"preset": "streaming_diloco", "clusters": {"num_clusters": 2}, **dsx}}


def test_presets_are_the_rows_of_the_table() -> None:
    rows = {name: PRESETS[name](2) for name in PRESETS}
    kinds = {
        name: (type(m.fragments), type(m.schedule), type(m.delay), type(m.outer_optimizer))
        for name, m in rows.items()
    }
    assert kinds == {
        "local_sgd": (WholeModel, Periodic, Blocking, SGD),
        "slowmo": (WholeModel, Periodic, Blocking, Momentum),
        "diloco": (WholeModel, Periodic, Blocking, Nesterov),
        "opendiloco": (WholeModel, Periodic, Blocking, Nesterov),
        "streaming_diloco": (ByLayer, Streaming, StreamingMerge, Nesterov),
        "cocodc": (ByLayer, AdaptiveTransmission, DelayCompensation, Nesterov),
        "diloco_delayed": (WholeModel, Periodic, OneStepDelay, Nesterov),
        "eager": (WholeModel, Periodic, Eager, Nesterov),
        "eager_2": (WholeModel, Periodic, Eager, Nesterov),
        "eager_fp4": (WholeModel, Periodic, Eager, Nesterov),
        "dilocox": (ByLayer, Periodic, OneStepDelay, Nesterov),
        "co2": (WholeModel, Periodic, OneStepDelay, Momentum),
        "dreamddp": (ByLayer, Layerwise, Average, NoOuterStep),
        "plsgd_enp": (ByLayer, Layerwise, Average, NoOuterStep),
        "overlap_local_sgd": (WholeModel, Periodic, Pullback, Momentum),
        "cocktail_sgd": (WholeModel, Periodic, Shift, SGD),
        "recommended": (ByLayer, Streaming, Shift, Nesterov),
    }
    assert rows["local_sgd"].outer_optimizer == SGD(lr=1.0)
    assert rows["slowmo"].outer_optimizer == Momentum(lr=1.0, momentum=0.5)
    assert rows["diloco"].outer_optimizer == Nesterov(lr=0.7, momentum=0.9)
    assert rows["opendiloco"].outer_optimizer == Nesterov(lr=0.7, momentum=0.9)
    assert (rows["opendiloco"].schedule.interval, rows["cocktail_sgd"].schedule.interval) == (
        500,
        1,
    )
    assert rows["opendiloco"].compression == Quantized("fp16", mean_wire="fp16", small_wire="fp16")
    assert rows["overlap_local_sgd"].outer_optimizer == Momentum(lr=1.0, momentum=0.7)
    assert rows["cocktail_sgd"].outer_optimizer == SGD(lr=1.0)
    assert rows["cocktail_sgd"].compression == RandomTopK(0.1, 0.08, error_feedback="none")
    assert rows["streaming_diloco"].outer_optimizer == Nesterov(lr=0.4, momentum=0.9)
    assert rows["cocodc"].outer_optimizer == Nesterov(lr=0.4, momentum=0.9)
    assert rows["diloco_delayed"].outer_optimizer == Nesterov(lr=0.2, momentum=0.9)
    assert rows["dilocox"].outer_optimizer == Nesterov(lr=0.2, momentum=0.9)
    assert rows["co2"].outer_optimizer == Momentum(lr=0.5, momentum=0.2, clip=1.0)
    assert rows["co2"].staleness == GapPenalty("tensor")
    assert isinstance(rows["dilocox"].control, AdaptiveRank)
    for num_clusters, lr in ((1, 0.4), (2, 0.4), (4, 0.3), (8, 0.25), (32, 0.2)):
        assert PRESETS["eager"](num_clusters).outer_optimizer == Nesterov(lr=lr, momentum=0.9)
    for num_clusters, lr in ((1, 0.2), (2, 0.2), (4, 0.1), (8, 0.075), (32, 0.06)):
        late = PRESETS["eager_2"](num_clusters)
        assert late.outer_optimizer == Nesterov(lr=lr, momentum=0.9)
        assert late.delay == Eager(outer_steps=2)
        in_codes = PRESETS["eager_fp4"](num_clusters)
        assert in_codes.compression == Quantized(wire="fp4_e3m0", error_feedback="none")
        assert replace(in_codes, compression=Dense()) == PRESETS["eager"](num_clusters)


@pytest.mark.parametrize("num_clusters", [2, 4, 8, 32])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_stable_as_they_come(name: str, num_clusters: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PRESETS[name](num_clusters).validate(num_clusters=num_clusters)


def test_a_key_overrides_one_value_and_keeps_the_others() -> None:
    method = preset("streaming_diloco", outer_optimizer={"lr": 0.7})
    assert method.outer_optimizer == Nesterov(lr=0.7, momentum=0.9)
    assert method.delay == StreamingMerge(steps=2, alpha=0.5)


def test_another_type_starts_from_its_own_defaults() -> None:
    method = preset("diloco", outer_optimizer={"type": "adam", "lr": 1e-3, "betas": [0.8, 0.9]})
    assert method.outer_optimizer == Adam(lr=1e-3, betas=(0.8, 0.9))


def test_load_from_a_file_and_from_a_mapping(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(block(schedule={"interval": 20})))
    for source in (path, str(path), block(schedule={"interval": 20})):
        config = load_config(source)
        assert config.method.schedule == Streaming(interval=20)
        assert config.clusters.rendezvous == "env://"
        assert config.axes["schedule"] == {"type": "streaming", "interval": 20}
    json.dumps(config.axes)  # what clusters compare must be plain


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("metrics", [{}, {"dir": "runs/x"}, {"dir": "x", "trace": True}])
def test_the_resolved_block_reads_as_the_same_again(name: str, metrics: dict[str, Any]) -> None:
    given = {"dsx": {"preset": name, "clusters": {"num_clusters": 2}, "metrics": metrics}}
    config = load_config(given)
    assert config.given == given
    block = json.loads(json.dumps(config.block()))
    again = load_config({"dsx": block})
    assert again.method == config.method and again.axes == config.axes
    assert again.block() == config.block() and block["metrics"]["tensorboard"] is False


def test_launch_arguments_override_the_file() -> None:
    given = {"cluster_id": 1, "rendezvous": "tcp://h:1", "store": None, "interface": "eth1"}
    clusters = with_launch_arguments(load_config(block()), given).clusters
    assert (clusters.cluster_id, clusters.rendezvous) == (1, "tcp://h:1")
    assert (clusters.store, clusters.interface) == ("cluster_0", "eth1")
    for bad, said in (
        ({"cluster_id": 2}, "cluster_id=2 must be below num_clusters=2"),
        ({"store": "standalone"}, "store='standalone' needs an address"),
        ({"store": "x"}, "'cluster_0' or 'standalone'"),
    ):
        with pytest.raises(ConfigError, match=said):
            with_launch_arguments(load_config(block()), bad)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, r'no "dsx" block'),
        ({"dsx": []}, r'"dsx" must be an object'),
        ({"dsx": {"clusters": {"num_clusters": 2}}}, r"dsx.preset is missing; choose one of local"),
        ({"dsx": {"preset": "diloco"}}, r"dsx.clusters is missing"),
        (block(preset="diloko"), r"dsx.preset='diloko' is not known; did you mean 'diloco'\?"),
        (block(preset=3), r"dsx.preset=3 is not known"),
        (block(shedule={}), r"dsx.shedule is not a known key; did you mean 'schedule'\?"),
        (block(schedule=20), r"dsx.schedule must be an object, not 20"),
        (block(schedule={"intervall": 20}), r"did you mean 'interval'\?"),
        (
            block(schedule={"interval": "20"}),
            r"dsx.schedule.interval='20' must be a whole number of at least 1; write 20$",
        ),
        (block(schedule={"interval": 20.5}), r"interval=20.5 must be a whole number .*; write 20$"),
        (block(schedule={"interval": 1e30}), r"interval=1e\+30 must be .*; leave it out for 100$"),
        (block(schedule={"interval": True}), r"dsx.schedule.interval=True must be a whole number"),
        (block(schedule={"interval": 10**30}), r"interval=10{30} must be at most 9007199254740992"),
        (block(schedule={"interval": 0}), r"schedule.interval=0 must be at least 1"),
        (block(preset="diloco", schedule={"interval": 0}), r"interval=0 must be at least 1"),
        (
            block(schedule={"interval": 3}),
            r"num_fragments=4 does not fit schedule.interval=3.*use num_fragments <= 3",
        ),
        (
            block(schedule={"interval": 20}, delay={"steps": 20}),
            r"delay.steps=20 must be below schedule.interval=20.*use steps <= 19",
        ),
        (block(delay={"steps": -1}), r"delay.steps=-1 must be at least 0"),
        (block(delay={"alpha": 0}), r"delay.alpha=0.0 must be above 0 and at most 1"),
        (block(delay={"alpha": 1.5}), r"delay.alpha=1.5 must be above 0 and at most 1"),
        (
            block(delay={"type": "blocking", "alpha": 0.5}),
            r"alpha is not a known key for type='bloc",
        ),
        (
            block(delay={"type": "streeming"}),
            r"delay.type='streeming' is not known; did you mean 'streaming'",
        ),
        (
            block(preset="diloco", delay={"type": "streaming"}),
            r"delay with type='streaming' needs steps",
        ),
        (block(fragments={"by": "model", "num_fragments": 2}), r"num_fragments is not a known key"),
        (block(fragments={"num_fragments": 0}), r"num_fragments=0 must be at least 1"),
        (block(fragments={"pattern": "x"}), r"pattern='x' must be 'strided' or 'sequential'"),
        (
            block(outer_optimizer={"lr": 0}),
            r"outer_optimizer.lr=0.0 must be a finite number above 0",
        ),
        (block(outer_optimizer={"momentum": 1}), r"momentum=1.0 must be at least 0 and below 1"),
        (
            block(outer_optimizer={"type": "sgd", "lr": 1, "momentum": 0.9}),
            r"momentum is not a known",
        ),
        (block(clusters={"num_clusters": 0}), r"clusters.num_clusters=0"),
        (block(clusters={"num_cluster": 2}), r"did you mean 'num_clusters'\?"),
        (block(clusters={}), r"dsx.clusters.num_clusters is missing"),
        (block(clusters={"num_clusters": 2, "store": "x"}), r"'cluster_0' or 'standalone'"),
        (block(clusters={"num_clusters": 2, "deadline_seconds": 0}), r"deadline_seconds=0"),
        (block(metrics={"tensorboard": True}), r"tensorboard=True needs dsx.metrics.dir"),
        (block(metrics={"trace": True}), r"metrics.trace=True needs dsx.metrics.dir"),
        (block(metrics={"dir": "r", "trace_steps": [2, 3]}), r"\[2, 3\] needs \"trace\": true"),
        (
            block(metrics={"dir": "r", "trace": True, "trace_steps": [3, 2]}),
            r"trace_steps=\[3, 2\] must be the first and the last step to trace, from 1",
        ),
        (
            block(metrics={"dir": "r", "trace": True, "trace_steps": [0, 2]}),
            r"trace_steps=\[0, 2\] must be",
        ),
        (block(metrics={"tensorbord": True}), r"did you mean 'tensorboard'\?"),
        (
            block(metrics={"prometheus": "9464"}),
            r"dsx.metrics.prometheus='9464' must be HOST:PORT, .* write, .*\"127.0.0.1:9464\"",
        ),
        (block(metrics={"prometheus": 9464}), r"dsx.metrics.prometheus=9464 must be"),
        (block(metrics={"prometheus": "a:65535"}), r"has no port for cluster 1: .* 65534 or less"),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(config)


@pytest.mark.parametrize("source", [None, [], 5, b"ds_config.json", {"dsx"}], ids=repr)
def test_what_is_neither_a_path_nor_a_dict_is_named(source: Any) -> None:
    with pytest.raises(
        ConfigError, match="is no DeepSpeed configuration: .* path of .* a dict"
    ) as e:
        load_config(source)
    assert str(e.value).startswith(repr(source))


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config file at"):
        load_config(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        load_config(tmp_path / "bad.json")


CONFIGS = [p for p in sorted((ROOT / "configs").rglob("*.json")) if "grafana" not in p.parts]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_config_that_ships_loads(path: Path) -> None:
    load_config(path)


def test_what_is_no_text_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no config file at {tmp_path}"):
        load_config(tmp_path)
    (tmp_path / "c.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="c.json is UTF-16, which is not read; save it as"):
        load_config(tmp_path / "c.json")


def test_one_fragment_per_layer_is_at_most_one_per_step() -> None:
    method, axes = resolve_method("recommended", {"schedule": {"interval": 8}})
    assert (method.fragments.most, axes["fragments"]["most"]) == (8, 8)
    longer, axes = resolve_method("recommended", {"schedule": {"interval": 64}})
    assert (longer.fragments.most, axes["fragments"]["most"]) == (16, 16)
