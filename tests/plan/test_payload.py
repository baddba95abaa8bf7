"""Predicted bytes and launches against runs of the library itself, in one process."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from dsx.config.schema import preset
from dsx.core.types import ParameterShape
from dsx.engines.simulated import SimulatedClusters
from dsx.method.choices import PRESETS
from dsx.method.method import Method
from dsx.plan.launches import launches_of
from dsx.plan.link import Costs, Link
from dsx.plan.predict import has_fixed_traffic, predict, run_bytes
from dsx.plan.traffic import Traffic, loads_of, one_rank

LINK = Link(1e9, 0.01)
STEP = 0.5
TIMES = {"step_seconds": 1.0, "transfer_seconds": 1.0}
OVERRIDES: dict[str, dict[str, Any]] = {
    "cocodc": {
        "schedule": {"interval": 12, "gamma": 0.9, **TIMES},
        "fragments": {"num_fragments": 3},
    },
    "streaming_diloco": {"fragments": {"num_fragments": 3}},
    "dilocox": {
        "fragments": {"num_fragments": 2},
        "compression": {"dense_rounds": 1},
        "control": {"rank": 4, "max_rank": 6, "step_seconds": 1.0, "round_seconds": 100.0},
    },
    "cocktail_sgd": {"schedule": {"interval": 1}},
    "dreamddp": {
        "schedule": {"interval": 3, "backward_seconds": [1.0] * 4, "transfer_seconds": [1.0] * 4}
    },
}
CODECS: dict[str, dict[str, Any]] = {
    "int4": {"type": "quantized"},
    "ternary": {"type": "quantized", "wire": "ternary", "group_size": 32, "mean_wire": "bf16"},
    "2bit": {"type": "quantized", "wire": "2bit", "mean_wire": "2bit"},
    "bf16": {"type": "quantized", "wire": "bf16", "small_wire": "fp32", "error_feedback": "bf16"},
    "low rank": {"type": "low_rank", "rank": 5, "factor_wire": "fp32", "exclude": ["layers.3"]},
    "top k": {"type": "top_k", "k": 30, "chunk": 1000},
    "random top k": {"type": "random_top_k", "chunk": 200},
}


class Net(nn.Module):
    """Layers with matrices that are worth a code, of which some are worth factors."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(40, 36), (36, 130), (130, 64), (64, 8)]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def method_of(name: str, num_clusters: int, **overrides: Any) -> Method:
    given = {"schedule": {"interval": 10}, **OVERRIDES.get(name, {}), **overrides}
    return preset(name, num_clusters, **given)


def shapes_of(model: nn.Module) -> list[ParameterShape]:
    return [ParameterShape(n, tuple(p.shape)) for n, p in model.named_parameters()]


def events_of(method: Method, num_clusters: int, steps: int) -> list[list[Any]]:
    """Return every cluster's syncs, of a run with seeds."""
    torch.manual_seed(0)
    model = Net()
    models = [copy.deepcopy(model) for _ in range(num_clusters)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in models]
    found: list[list[Any]] = [[] for _ in models]
    clusters = SimulatedClusters(
        models, optimizers, method, on_sync=lambda cluster, event: found[cluster].append(event)
    )
    for _ in range(steps):
        clusters.train_step(lambda m, cluster, step: m(torch.randn(2, 40)))
    return found


def assert_bytes_agree(method: Method, num_clusters: int, periods: int) -> None:
    """Compare the last of so many periods (the first ones may be dense, or iterate twice)."""
    ranks = one_rank(method.fragments, shapes_of(Net()))
    prediction = predict(method, ranks, STEP, LINK, num_clusters)
    traffic = Traffic(method, loads_of(ranks), num_clusters)
    steps = prediction.steps_per_round
    tau = steps if method.delay.steps == "auto" else method.delay.steps
    under_way = tau + method.delay.rounds_under_way * steps
    events = events_of(method, num_clusters, periods * steps + under_way)
    last = range((periods - 1) * steps + 1, periods * steps + 1)
    for cluster in range(num_clusters):
        of_period = [e for e in events[cluster] if e["launched_step"] in last]
        assert len(of_period) == prediction.transmissions
        sent = sum(e["bytes_sent"] for e in of_period)
        if not method.schedule.uses_norms:
            assert sent == prediction.bytes_by_cluster[cluster]
        for event in of_period:  # of adaptive ones norms decide, which a plan takes to be equal
            assert event["bytes_sent"] == traffic.bytes_sent[event["fragment"]][cluster]
    assert prediction.bytes_per_round == max(prediction.bytes_by_cluster)


@pytest.mark.parametrize(("name", "num_clusters"), [*((n, 3) for n in PRESETS), ("dilocox", 5)])
def test_a_period_of_every_preset_sends_what_is_predicted(name: str, num_clusters: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_bytes_agree(method_of(name, num_clusters), num_clusters, periods=3)


@pytest.mark.parametrize(
    ("codec", "num_clusters"), [*((codec, 4) for codec in CODECS), ("int4", 1), ("ternary", 2)]
)
def test_so_does_every_codec(codec: str, num_clusters: int) -> None:
    method = method_of("streaming_diloco", num_clusters, compression=CODECS[codec])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_bytes_agree(method, num_clusters, periods=3)


@pytest.mark.parametrize("num_clusters", [2, 5])
@pytest.mark.parametrize(
    "codec",
    [
        {"type": "low_rank", "rank": 3},
        {"type": "low_rank", "rank": 3, "dense_rounds": 2, "full_round_every": 4},
        {"type": "quantized"},
    ],
    ids=["cold start", "dense rounds", "no matrices"],
)
def test_the_first_rounds_of_a_run_are_counted_too(
    codec: dict[str, Any], num_clusters: int
) -> None:
    method = method_of("streaming_diloco", num_clusters, compression=codec)
    ranks, steps = one_rank(method.fragments, shapes_of(Net())), method.schedule.interval
    events = events_of(method, num_clusters, 5 * steps + method.delay.steps)
    for rounds in (1, 2, 3, 5):
        sent = [
            sum(e["bytes_sent"] for e in own if e["launched_step"] <= rounds * steps)
            for own in events
        ]
        assert run_bytes(method, ranks, num_clusters, rounds) == max(sent)


@pytest.mark.parametrize("name", ["dreamddp", "cocodc", "dilocox"])
def test_no_number_is_given_for_what_a_run_decides(name: str) -> None:
    method = method_of(name, 2)
    with pytest.raises(ValueError, match="known beforehand only where every fragment"):
        run_bytes(method, one_rank(method.fragments, shapes_of(Net())), 2, 3)


def test_a_controller_that_is_held_has_a_number() -> None:
    held = {"rank": 4, "min_rank": 4, "max_rank": 4, "min_interval": 10}
    assert has_fixed_traffic(method_of("dilocox", 2, control=held))
    assert not has_fixed_traffic(method_of("dilocox", 2, control={**held, "max_rank": 5}))
    assert not has_fixed_traffic(method_of("dilocox", 2, control={**held, "min_interval": 5}))


def test_measured_times_travel_with_the_transfers() -> None:
    method = method_of("cocodc", 3, schedule={"interval": 12})
    ranks = one_rank(method.fragments, shapes_of(Net()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        events = events_of(method, 3, 14)
    traffic = Traffic(method, loads_of(ranks), 3)
    assert method.uses_seconds
    for cluster, own in enumerate(events):
        for event in own:
            assert event["bytes_sent"] == traffic.bytes_sent[event["fragment"]][cluster]


@pytest.mark.parametrize("name", ["streaming_diloco", "cocodc", "dreamddp"])
def test_fragments_leave_when_it_is_predicted(name: str) -> None:
    method = method_of(name, 2)
    ranks = one_rank(method.fragments, shapes_of(Net()))
    traffic = Traffic(method, loads_of(ranks), 2)
    transfers = [traffic.cost(i, LINK, Costs()) for i in range(len(traffic.loads))]
    launches = launches_of(method, traffic, transfers, 1.0)
    steps = method.schedule.interval
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        events = events_of(method, 2, 4 * steps + 3)[0]
    last = sorted(e["launched_step"] - 3 * steps for e in events)
    assert [launch.step for launch in launches] == [s for s in last if 0 < s <= steps]
