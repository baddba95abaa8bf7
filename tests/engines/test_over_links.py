"""Engines over links with keys, a launcher per cluster: the bits that they have over gloo."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from dsx.comm.elastic import ElasticTransport
from dsx.comm.world import current_world
from tests.distributed import run_distributed
from tests.engines import megatrons, pipelines, test_deepspeed_pipeline, test_megatron
from tests.engines import test_deepspeed as deepspeeds
from tests.engines.engines import NUM_CLUSTERS, RANKS_PER_CLUSTER
from tests.engines.engines import Kind as Zero
from tests.installed import needs
from tests.over_links import run_over_links

pytestmark = [pytest.mark.ci, needs("deepspeed")]

STREAMS = 3
ENGINES = {
    "ZeRO": (
        deepspeeds.train_kinds,
        [
            Zero(0, groups="two", optimizer="adamw"),
            Zero(2, groups="two", zero=("offload",)),
            Zero(3, optimizer="adamw", preset="cocodc"),
            Zero(3, "bf16", groups="two", zero=("sub_groups", "some_persistent")),
        ],
        "deepspeed",
    ),
    "pipeline": (
        test_deepspeed_pipeline.train_kinds,
        [
            pipelines.Kind(0, is_tied=True, preset="dreamddp"),
            pipelines.Kind(1, is_tied=True, groups="two", optimizer="adamw"),
        ],
        "deepspeed",
    ),
    "Megatron": (
        test_megatron.train_kinds,
        [
            megatrons.Kind(tensor=2),
            megatrons.Kind(pipeline=2, chunks=2),
            megatrons.Kind(is_sharded=True, overlaps=True),
        ],
        "megatron",
    ),
}
HAS_MEGATRON = importlib.util.find_spec("megatron") is not None


def over_links(train: Any, kinds: Sequence[Any]) -> Any:
    """Train, and say what the messages have gone over."""
    world = current_world()
    assert world is not None and world.rank_info.world_size == RANKS_PER_CLUSTER
    transports: list[Any] = []
    connect = world.connect

    def noted(*args: Any) -> Any:
        transports.append(connect(*args))
        return transports[-1]

    world.connect = noted  # type: ignore[method-assign]
    results = train(kinds)
    assert len(transports) == len(kinds)
    assert all(isinstance(each, ElasticTransport) for each in transports)
    return results


def differences(ours: Any, theirs: Any, at: str = "") -> list[str]:
    """Return where two results are not the same, to the bit."""
    if isinstance(ours, Mapping):
        assert ours.keys() == theirs.keys(), at
        return [d for key in ours for d in differences(ours[key], theirs[key], f"{at}/{key}")]
    if isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), at
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [d for index, pair in pairs for d in differences(*pair, f"{at}/{index}")]
    if isinstance(ours, np.ndarray):
        is_same = ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()
        return [] if is_same else [at]
    return [] if ours == theirs else [f"{at}: {ours} and {theirs}"]


@pytest.mark.parametrize("name", ENGINES)
def test_the_bits_are_those_over_gloo(name: str) -> None:
    train, kinds, engine = ENGINES[name]
    if engine == "megatron" and not HAS_MEGATRON:
        pytest.skip("no megatron-core")
    found = run_over_links(
        over_links, NUM_CLUSTERS, RANKS_PER_CLUSTER, train, kinds, streams=STREAMS,
        timeout_seconds=140, engine=engine,
    )  # fmt: skip
    expected = run_distributed(
        train, NUM_CLUSTERS * RANKS_PER_CLUSTER, kinds, timeout_seconds=140, engine=engine
    )
    assert differences(found, expected) == []
    assert all(min(result["rounds"]) >= 2 for rank in found for result in rank)
