"""DreamDDP's trigger inside the backward, its table from measured times, and its refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsx.config.schema import ConfigError, preset
from dsx.core.types import History, Stage, SyncParams
from dsx.engines.torch import TorchAdapter
from dsx.method.schedule.layerwise import Layerwise
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, BACKWARD, TRANSFER, TinyNet, mean_loss


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_layer_is_launched_before_the_backward_reaches_the_layers_below(when: str) -> None:
    seconds = {"backward_seconds": BACKWARD, "transfer_seconds": TRANSFER}
    method = preset("dreamddp", schedule={"interval": 3, "when": when, **seconds})
    run = Simulated(TinyNet(), sgd, method, 2)
    order: list[str] = []
    loop, model = run.loops[0], run.models[0]
    launch = loop._launch

    def noted(fragment: int, *args: Any, **kwargs: Any) -> None:
        order.append(f"launch {fragment}")
        launch(fragment, *args, **kwargs)

    loop._launch = noted  # type: ignore[method-assign]
    for i, layer in enumerate(model.layers):
        layer.weight.register_hook(lambda grad, i=i: order.append(f"gradient {i}"))
    run.train_step(mean_loss)
    assert order == [f"{what} {i}" for i in (3, 2, 1, 0) for what in ("gradient", "launch")]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_launch_inside_the_first_backward_is_not_said_to_be_idle(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = {"backward_seconds": BACKWARD, "transfer_seconds": TRANSFER}
    method = preset("dreamddp", schedule={"interval": 2, "when": when, **seconds})
    run = Simulated(TinyNet(), sgd, method, 2)
    for _ in range(4):
        run.train_step(mean_loss)
    assert not caplog.records


def test_only_the_last_micro_batch_counts() -> None:
    seconds = {"backward_seconds": BACKWARD, "transfer_seconds": TRANSFER}
    method = preset("dreamddp", schedule={"interval": 1, "backwards": 2, **seconds})
    run = Simulated(TinyNet(), sgd, method, 2)
    for step in range(1, 4):
        for cluster, (model, optimizer) in enumerate(zip(run.models, run.optimizers, strict=True)):
            optimizer.zero_grad()
            for part in range(2):
                assert not any(t for t in run.loops[cluster].in_flight)
                (mean_loss(model, cluster, step, part + 1) / 2).backward()
            assert len(run.loops[cluster].in_flight) == 4
            optimizer.step()
        run.step()
    assert run.num_syncs == 12


@pytest.mark.parametrize("make", ["SGD", "AdamW"])
def test_after_takes_each_layers_own_step_inside_the_backward_once(make: str) -> None:
    """One cluster averages with itself: the run must equal the optimizer alone, bit for bit."""
    rate = {"lr": 0.05}
    build = lambda m: getattr(torch.optim, make)(m.parameters(), **rate)  # noqa: E731
    run = Simulated(TinyNet(), build, ALL_CASES["dreamddp, after"].method(1), 1)
    alone = TinyNet()
    optimizer = build(alone)
    for step in range(1, 10):
        run.train_step(mean_loss)
        optimizer.zero_grad()
        mean_loss(alone, 0, step).backward()
        optimizer.step()
    for name, value in alone.named_parameters():
        assert torch.equal(run.parameters()[0][name], value.detach())


def test_a_layer_whose_gradients_never_come_is_launched_at_the_boundary() -> None:
    run = Simulated(TinyNet(), sgd, ALL_CASES["dreamddp"].method(), 2)
    for model in run.models:
        model.layers[1].bias.requires_grad_(False)
    for _ in range(6):
        run.train_step(mean_loss)
    assert min(run.loops[0].history.rounds) >= 2
    assert run.loops[0].history == run.loops[1].history


@pytest.mark.parametrize("which", ["weight", ""])
@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("name", ["dreamddp", "dreamddp, after"])
def test_what_was_frozen_at_the_start_trains_once_it_is_not(
    name: str, layer: int, which: str
) -> None:
    """One cluster averages with itself: the run must equal the optimizer alone, bit for bit."""
    alone = TinyNet()
    members = [p for n, p in alone.named_parameters() if n.startswith(f"layers.{layer}.{which}")]
    for parameter in members:
        parameter.requires_grad_(False)
    schedule = {"interval": 1, "backward_seconds": BACKWARD, "transfer_seconds": TRANSFER}
    schedule["when"] = "after" if name.endswith("after") else "before"
    run = Simulated(alone, sgd, preset("dreamddp", 1, schedule=schedule), 1)
    optimizer = sgd(alone)
    for step in range(1, 10):
        if step in (4, 7):  # trained from 4 on, frozen again from 7 on
            for model in (alone, run.models[0]):
                for parameter_name, parameter in model.named_parameters():
                    if parameter_name.startswith(f"layers.{layer}.{which}"):
                        parameter.requires_grad_(step == 4)
        launched = watch_launches(run)
        run.train_step(mean_loss)
        assert launched == [True] * 4  # all from inside the backward
        optimizer.zero_grad()
        mean_loss(alone, 0, step).backward()
        optimizer.step()
        for parameter_name, value in alone.named_parameters():
            assert torch.equal(run.parameters()[0][parameter_name], value.detach()), step
    assert not torch.equal(members[0], dict(TinyNet().named_parameters())[f"layers.{layer}.weight"])


def watch_launches(run: Simulated) -> list[bool]:
    """Return whether launches are from inside the backward, as they come, until the next call."""
    noted: list[bool] = []
    launch = type(run.loops[0])._launch

    def noting(fragment: int, step: int, is_in_backward: bool = False, shared_by: int = 1) -> None:
        noted.append(is_in_backward)
        launch(run.loops[0], fragment, step, is_in_backward, shared_by)

    run.loops[0]._launch = noting  # type: ignore[method-assign]
    return noted


def test_clusters_whose_graphs_differ_still_meet() -> None:
    """Cluster 1 leaves a layer out now and then; its fragments keep the table's order."""
    run = Simulated(TinyNet(), sgd, ALL_CASES["dreamddp"].method(), 2)

    def loss(model: Any, cluster: int, step: int) -> torch.Tensor:
        x = torch.ones(2, 6)
        for index, layer in enumerate(model.layers):
            if not (cluster == 1 and index == step % 4):
                x = torch.tanh(layer(x))
        return x.square().mean()

    for _ in range(9):
        run.train_step(loss)
    assert run.loops[0].history == run.loops[1].history
    assert min(run.loops[0].history.rounds) >= 3


def test_more_backwards_than_declared_are_refused() -> None:
    run = Simulated(TinyNet(), sgd, ALL_CASES["dreamddp, after"].method(1), 1)
    mean_loss(run.models[0], 0, 1).backward()
    with pytest.raises(RuntimeError, match=r"more gradients .* than schedule.backwards=1"):
        mean_loss(run.models[0], 0, 2).backward()


def test_after_refuses_an_optimizer_with_a_closure() -> None:
    with pytest.raises(ValueError, match=r"LBFGS cannot do.*use schedule.when='before'"):
        Simulated(
            TinyNet(),
            lambda m: torch.optim.LBFGS(m.parameters()),
            ALL_CASES["dreamddp, after"].method(1),
            1,
        )


def test_a_layer_that_is_never_measured_takes_the_mean_of_the_others() -> None:
    schedule, history, sync_params = Layerwise(3), History(3), SyncParams(3)
    history.backward_seconds, history.transfer_seconds = [1.0, None, 3.0], [0.5, 0.5, 0.5]
    schedule.advance(history, sync_params)
    assert history.plan["backward"] == [1.0, 2.0, 3.0]


def test_an_output_layer_of_one_parameter_and_a_frozen_one_are_measured() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6, bias=False) for _ in range(3)))
    model[1].weight.requires_grad_(False)
    adapter = TorchAdapter(
        model, torch.optim.SGD(model.parameters(), 0.1), preset("dreamddp").fragments
    )
    seen: list[int] = []
    adapter.watch_backward(seen.append, "before")
    model(torch.ones(2, 6)).sum().backward()
    assert seen[0] == 1 and sorted(seen) == [0, 1, 2]  # the frozen one waits for nothing
    assert all(adapter.backward_seconds(p) is not None for p in range(3))


def test_the_table_follows_measured_times_and_only_when_they_have_moved() -> None:
    schedule, history, sync_params = Layerwise(2), History(2), SyncParams(2)
    schedule.advance(history, sync_params)
    first = history.plan["table"]
    history.backward_seconds, history.transfer_seconds = [1.0, 1.0], [0.5, 9.0]
    history.step = 1
    schedule.advance(history, sync_params)
    assert history.plan["table"] is first  # in the middle of a period
    history.step = 2
    schedule.advance(history, sync_params)
    assert history.plan["transfer"] == [0.5, 9.0] and history.plan["start"] == 2
    table = history.plan["table"]
    history.step, history.transfer_seconds = 4, [0.55, 9.9]  # within 20 %
    schedule.advance(history, sync_params)
    assert history.plan["table"] is table and history.plan["start"] == 4
    history.step, history.transfer_seconds = 6, [0.7, 9.0]
    schedule.advance(history, sync_params)
    assert history.plan["transfer"] == [0.7, 9.0]
    sent = {p for t in (7, 8) for p in schedule.due(t, history, sync_params, Stage())}
    assert sent == {0, 1}


def test_nothing_is_sent_twice_before_times_are_known() -> None:
    schedule, history, sync_params = Layerwise(50), History(4), SyncParams(50)
    schedule.advance(history, sync_params)
    sent = [p for t in range(1, 51) for p in schedule.due(t, history, sync_params, Stage())]
    assert sorted(sent) == [0, 1, 2, 3]
    history.step = 50
    history.backward_seconds = history.transfer_seconds = [1.0] * 4  # like what was assumed
    schedule.advance(history, sync_params)
    filled = [p for t in range(51, 101) for p in schedule.due(t, history, sync_params, Stage())]
    assert len(filled) > 4 and set(filled) == {0, 1, 2, 3}


@pytest.mark.parametrize("seconds", [None, (0.1, 0.2, 9.0, 0.1)])
def test_equal_numbers_of_layers_whatever_they_take(seconds: tuple[float, ...] | None) -> None:
    """PLSGD-ENP; and what the optimal one does until it knows."""
    schedule = Layerwise(
        2, assignment="equal_numbers", backward_seconds=seconds, transfer_seconds=seconds
    )
    schedule.validate(4)
    assert not schedule.uses_seconds
    history, sync_params = History(4), SyncParams(2)
    unmeasured = Layerwise(2)
    for step in (0, 2, 4):
        history.step = step
        schedule.advance(history, sync_params)
        due = [list(schedule.due(step + t, history, sync_params, Stage())) for t in (1, 2)]
        assert due == [[3, 2], [1, 0]]
        history.backward_seconds = history.transfer_seconds = [1.0, 5.0, 0.1, 9.0]
    first = History(4)
    unmeasured.advance(first, sync_params)
    assert first.plan["table"] == [[3, 2], [1, 0]]
    with pytest.raises(ValueError, match="schedule.assignment='even' is not known"):
        Layerwise(2, assignment="even").validate(4)  # type: ignore[arg-type]


def test_backward_seconds_are_those_of_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that only the layers' backwards move."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    class Ticks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
            ctx.seconds = seconds
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            clock[0] += ctx.seconds
            return grad, None

    class Slow(TinyNet):
        def forward(self, x: torch.Tensor, y: Any = None) -> torch.Tensor:
            for layer, seconds in zip(self.layers, (1.0, 5.0, 2.0, 3.0), strict=True):
                x = Ticks.apply(torch.tanh(layer(x)), seconds)
            return x

    model = Slow()
    adapter = TorchAdapter(model, sgd(model), preset("dreamddp").fragments)
    adapter.watch_backward(lambda fragment: None, "before")
    model(torch.ones(2, 6)).sum().backward()
    assert [adapter.backward_seconds(p) for p in range(4)] == [1.0, 5.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ({"interval": 0}, r"interval=0 must be at least 1"),
        ({"backwards": 0}, r"schedule.backwards=0 must be at least 1"),
        ({"backward_seconds": [1.0]}, r"belong together"),
        ({"when": "later"}, r"'before' or 'after'"),
    ],
)
def test_mistakes_are_named(schedule: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        preset("dreamddp", schedule=schedule)


def test_one_time_per_layer_of_the_model() -> None:
    method = preset(
        "dreamddp", schedule={"backward_seconds": [1.0] * 3, "transfer_seconds": [1.0] * 3}
    )
    with pytest.raises(ValueError, match=r"backward_seconds has 3 numbers for 4 layers"):
        Simulated(TinyNet(), sgd, method, 2)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"outer_optimizer": {"type": "sgd", "lr": 1.0}}, r"set outer_optimizer.type='none'"),
        ({"delay": {"type": "blocking"}}, r"keeps no anchor.*use delay.type='average'"),
        ({"delay": {"steps": 1}}, r"applied at the end of the same step; use delay.steps=0"),
        (
            {"delay": {"type": "blocking"}, "outer_optimizer": {"type": "sgd", "lr": 1.0}},
            r"launches inside the backward.*use delay.type='average'",
        ),
    ],
)
def test_what_cannot_go_together_is_refused(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        preset("dreamddp", **overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"outer_optimizer": {"type": "adam", "lr": 0.1}}, r"which adam does not allow"),
        ({"outer_optimizer": {"clip": 1.0}}, r"which a clip does not allow"),
        ({"staleness": {"type": "gap"}}, r"use staleness.type='none'"),
        ({"delay": {"outer_steps": 3}}, r"outer_steps=3 must be at least 1 and at most 2"),
    ],
)
def test_what_eager_cannot_split_is_refused(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        preset("eager", **overrides)


def test_the_penalty_needs_a_momentum() -> None:
    with pytest.raises(ConfigError, match=r"momentum 0 is plain sgd"):
        preset("co2", outer_optimizer={"type": "sgd", "lr": 0.5})
