"""The methods in plain torch, one loop, without dsx: the oracle of the other tests.

Written from the definitions: what each cluster sends, the mean over clusters, an outer rule, and
a merge. Per parameter, no flat buffers, no threads, no hooks. Eager overlap is in the *paper's*
form, each cluster with its own anchor, so that the shared form of dsx is checked against it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.reference_schedules import Adaptive, Clock, due_by_table, due_periodic, due_streaming

Tensors = dict[str, Tensor]
Rule = Callable[[Tensor, Tensor, "Recipe"], Tensor]  # of a buffer, moved in place, and D


@dataclass(frozen=True)
class Recipe:
    """What a method does, in the symbols of the papers."""

    fragments: Sequence[Sequence[str]]  # names of parameters
    interval: int  # H
    streaming: bool  # fragment p at offset floor((p+1) H / P) instead of all at H
    tau: int
    alpha: float  # weight of the anchor
    rule: str | Rule  # sgd | momentum | nesterov
    eta: float
    mu: float = 0.0
    delay: str = "blend"  # blend | compensation | delayed | eager | average | shift | pullback
    lam: float = 0.5  # compensation
    mode: str = "constant"  # constant | dc_asgd | scale_free
    first_round: str = "restart"  # delayed: restart | local
    outer_steps: int = 1  # eager: n; shift: 0 waits
    when: str | None = None  # average inside the backward: before | after
    penalty: str | None = None  # tensor | element
    clip: float | None = None
    adaptive: Adaptive | None = None
    table: Sequence[Sequence[int]] | None = None
    moves: tuple[int, int] | None = None  # after so many transfers applied, H is this
    code: Callable[[Tensor], Tensor] | None = None  # what is decoded of a tensor that is sent
    feedback: bool = False  # x = D + e is sent, and e is what its code has lost
    code_of_mean: Callable[[Tensor], Tensor] | None = None  # of y = mean + e, sent by its owner
    kept: Callable[[Tensor, str, int], Tensor] | None = None  # of a parameter's buffer, by round


@dataclass
class Flight:
    """A transfer: what every cluster sent, and the mean."""

    fragment: int
    launched: int
    interval: int
    own: list[Tensors]  # contributions by cluster
    sent: list[Tensors]  # parameters by cluster
    mean: Tensors
    first_step: Tensors  # CO2: mean size of the round's first inner step


@dataclass
class Reference:
    """The outer training of C clusters; `boundary` is called after every inner step."""

    recipe: Recipe
    local: list[Tensors]
    clock: Clock
    anchor: Tensors = field(default_factory=dict)
    buffer: Tensors = field(default_factory=dict)
    own_anchor: list[Tensors] = field(default_factory=list)  # eager, the paper's Theta^m
    own_buffer: list[Tensors] = field(default_factory=list)
    start: list[Tensors] = field(default_factory=list)  # where each cluster's round started
    first_step: Tensors = field(default_factory=dict)
    last_update: Tensors = field(default_factory=dict)
    in_flight: list[Flight] = field(default_factory=list)
    past: dict[int, list[Flight]] = field(default_factory=dict)  # by fragment, for eager
    residual: list[Tensors] = field(default_factory=list)  # what codes have lost, by cluster
    lost_of_mean: Tensors = field(default_factory=dict)  # e of the second leg: y - what is sent
    shared_buffer: Tensors = field(default_factory=dict)  # eager: of the means before a finish

    def __post_init__(self) -> None:
        self.anchor = {n: p.detach().clone() for n, p in self.local[0].items()}
        self.buffer = {n: torch.zeros_like(p) for n, p in self.anchor.items()}
        self.own_anchor = [copy.deepcopy(self.anchor) for _ in self.local]
        self.own_buffer = [copy.deepcopy(self.buffer) for _ in self.local]
        self.start = [copy.deepcopy(self.anchor) for _ in self.local]
        self.past = {p: [] for p in range(len(self.recipe.fragments))}
        self.residual = [copy.deepcopy(self.buffer) for _ in self.local]
        self.lost_of_mean = copy.deepcopy(self.buffer)

    def boundary(self, step: int, before: list[Tensors]) -> None:
        """Launch what is due, then apply what is ripe; `before`: the weights before this step."""
        self.observe_first_steps(step)
        for p in self.due(step):
            self.launch(p, step, before)
        for flight in [f for f in self.in_flight if self.is_ripe(f, step)]:
            self.in_flight.remove(flight)
            self.apply(flight, step)
        for p, launched in enumerate(self.clock.launched):
            if launched == step:
                self.begin_round(p)
        if self.recipe.adaptive is not None:
            self.recipe.adaptive.end_boundary(step, self.recipe.interval, self.clock)

    def begin_round(self, p: int) -> None:
        for m, theta in enumerate(self.local):
            for n in self.recipe.fragments[p]:
                self.start[m][n] = theta[n].detach().clone()

    def finish(self, step: int) -> None:
        """Apply what is under way; rounds start anew, with what was done since the last launches.

        Where applying replaces the parameters by the anchor, a cluster's way since its round began
        is laid onto the new anchor. Eager clusters go on from the shared anchor, as they began; the
        momentum of the means is theirs again as soon as a mean is.
        """
        is_replaced = self.recipe.delay in ("delayed", "eager", "pullback")
        finished = {flight.fragment for flight in self.in_flight}
        names = [n for p in sorted(finished) for n in self.recipe.fragments[p] if is_replaced]
        ways = [
            {n: theta[n] - self.origin(m, n) for n in names} for m, theta in enumerate(self.local)
        ]
        for flight in self.in_flight:
            self.apply(flight, step)
        self.in_flight = []
        for n in names:
            self.shared_buffer[n] = self.buffer[n].clone()
            for m, theta in enumerate(self.local):
                theta[n].copy_(self.anchor[n] + ways[m][n])
                self.start[m][n] = self.anchor[n].clone()
                self.own_anchor[m][n] = self.anchor[n].clone()
                self.own_buffer[m][n].zero_()
        for p, launched in enumerate(self.clock.launched):
            if launched == step:
                self.begin_round(p)
            if is_replaced and p in finished:
                self.past[p] = []
        self.clock.under_way = [0] * len(self.clock.under_way)

    def origin(self, m: int, n: str) -> Tensor:
        """Where a cluster's round has begun."""
        if self.recipe.delay == "eager" or self.recipe.first_round == "local":
            return self.start[m][n]
        return self.anchor[n]

    def due(self, step: int) -> Sequence[int]:
        recipe, count = self.recipe, len(self.recipe.fragments)
        if recipe.adaptive is not None:
            return recipe.adaptive.due(step, recipe.interval, self.clock)
        if recipe.table is not None:
            return due_by_table(recipe.table, step)
        due = due_streaming if recipe.streaming else due_periodic
        has_moved = recipe.moves is not None and self.clock.num_applied >= recipe.moves[0]
        return due(step, recipe.moves[1] if has_moved else recipe.interval, count)

    def pull(self, p: int) -> None:
        """Overlap-Local-SGD: the anchor on its way since the last round is here; go toward it."""
        for flight in [f for f in self.in_flight if f.fragment == p]:
            self.in_flight.remove(flight)
            self.move_late_anchor(flight)
        alpha = self.recipe.alpha
        for theta in self.local:
            for n in self.recipe.fragments[p]:
                theta[n].copy_((1 - alpha) * theta[n] + alpha * self.anchor[n])

    def move_late_anchor(self, flight: Flight) -> None:
        """v = beta * v + mean x' - z; z = z + v."""
        for n, mean in flight.mean.items():
            self.buffer[n] = self.recipe.mu * self.buffer[n] + mean - self.anchor[n]
            self.anchor[n] = self.anchor[n] + self.buffer[n]

    def launch(self, p: int, step: int, before: list[Tensors]) -> None:
        recipe, names = self.recipe, self.recipe.fragments[p]
        if recipe.delay == "pullback":
            self.pull(p)
        weights = before if recipe.when == "before" else self.local
        sent = [{n: theta[n].detach().clone() for n in names} for theta in weights]
        own: list[Tensors] = []
        for m, theta in enumerate(sent):
            if recipe.delay in ("average", "pullback"):
                own.append(theta)
            elif recipe.delay == "shift":  # what has been sent is not sent again
                late = [f.own[m] for f in self.in_flight if f.fragment == p]
                gone = {n: sum(d[n] for d in late) for n in names}
                own.append({n: self.anchor[n] - theta[n] - gone[n] for n in names})
            else:
                own.append({n: self.origin(m, n) - theta[n] for n in names})
        own = [{n: self.coded(m, n, d[n]) for n in names} for m, d in enumerate(own)]
        mean = {n: self.returned(n, sum(d[n] for d in own) / len(own)) for n in names}
        interval = step - self.clock.launched[p]
        first = {n: self.first_step[n] for n in names} if recipe.penalty else {}
        flight = Flight(p, step, interval, own, sent, mean, first)
        self.clock.launched[p] = step
        self.clock.under_way[p] += 1
        self.in_flight.append(flight)
        self.past[p].append(flight)
        if recipe.delay == "delayed" and len(self.past[p]) == 1:  # nothing to apply yet
            if recipe.first_round == "restart":
                for theta in self.local:
                    for n in names:
                        theta[n].copy_(self.anchor[n])
            self.clock.under_way[p] = 0
        if recipe.delay == "eager":
            self.eager_step(p)
        if recipe.delay == "shift" and recipe.outer_steps and len(self.past[p]) == 1:
            self.clock.under_way[p] = 0

    def returned(self, n: str, mean: Tensor) -> Tensor:
        """Return what all decode of a mean, which has what was lost of it before in it."""
        if self.recipe.code_of_mean is None:
            return mean
        y = mean + self.lost_of_mean[n]
        decoded = self.recipe.code_of_mean(y)
        self.lost_of_mean[n] = y - decoded
        return decoded

    def coded(self, m: int, n: str, x: Tensor) -> Tensor:
        """What everybody decodes of a tensor that cluster m sends."""
        if self.recipe.code is None:
            return x
        if self.recipe.feedback:
            x = x + self.residual[m][n]
        decoded = self.recipe.code(x)
        if self.recipe.feedback:
            self.residual[m][n] = x - decoded
        return decoded

    def is_ripe(self, flight: Flight, step: int) -> bool:
        if self.recipe.delay == "delayed":
            return self.past[flight.fragment][-1] is not flight
        if self.recipe.delay == "pullback":
            return False  # taken in by the next launch
        if self.recipe.delay == "shift" and self.recipe.outer_steps:
            return self.past[flight.fragment][-1] is not flight
        if self.recipe.delay == "eager":
            return len(self.past[flight.fragment]) > self.recipe.outer_steps + self.past[
                flight.fragment
            ].index(flight)
        return step >= flight.launched + self.recipe.tau

    def apply(self, flight: Flight, step: int) -> None:
        self.clock.complete(flight.fragment, flight.interval, flight.mean)
        if self.recipe.delay == "pullback":
            self.move_late_anchor(flight)
            return
        if self.recipe.delay == "average":
            for theta, sent in zip(self.local, flight.sent, strict=True):
                for n, mean in flight.mean.items():
                    theta[n].add_(mean - sent[n])
            return
        for n in flight.mean:
            gradient = self.penalised(n, flight)
            update = self.outer_update(self.buffer[n], gradient)
            self.anchor[n] -= update
            if self.recipe.kept is not None:
                round = self.clock.num_rounds[flight.fragment]
                self.buffer[n] = self.recipe.kept(self.buffer[n], n, round)
            if self.recipe.delay == "shift":  # CocktailSGD: out with one's own, in with all's
                for m, theta in enumerate(self.local):
                    theta[n] += flight.own[m][n] - update
            if self.recipe.penalty:
                self.last_update[n] = self.size(update)
        if self.recipe.delay not in ("eager", "shift"):
            for m, theta in enumerate(self.local):
                for n in flight.mean:
                    theta[n].copy_(self.merged(n, theta[n], m, flight, step))

    def merged(self, n: str, theta: Tensor, m: int, flight: Flight, step: int) -> Tensor:
        """What a cluster goes on from, by the apply rule."""
        if self.recipe.delay == "delayed":
            return self.anchor[n]
        if self.recipe.delay == "blend":
            return (1 - self.recipe.alpha) * theta + self.recipe.alpha * self.anchor[n]
        tau, sent = step - flight.launched, flight.sent[m][n]
        if tau == 0:  # finished at its launch: no step was missed
            return self.anchor[n]
        g = (sent - theta) / tau
        lam: Any = self.recipe.lam
        if self.recipe.mode == "dc_asgd":
            lam = lam / torch.sqrt((g * g).mean() + 1e-7)
        elif self.recipe.mode == "scale_free":
            lam = lam / (g * g).mean()
        correction = lam * g * g * (self.anchor[n] - sent) / flight.interval
        if self.recipe.mode == "scale_free":
            correction = torch.maximum(torch.minimum(correction, g.abs()), -g.abs())
        return self.anchor[n] - tau * (g + correction)

    def eager_step(self, p: int) -> None:
        """Eager Updates, Alg. 3: E_k^m = D_{k-n} + (D_k^m - D_{k-n}^m) / C, own anchors."""
        num_clusters, past = len(self.local), self.past[p]
        fresh = past[-1]
        late = past[-1 - self.recipe.outer_steps] if len(past) > self.recipe.outer_steps else None
        names = self.recipe.fragments[p] if late is not None else ()
        before = {n: self.shared_buffer.pop(n) for n in names if n in self.shared_buffer}
        for m, theta in enumerate(self.local):
            for n in self.recipe.fragments[p]:
                gradient = fresh.own[m][n] / num_clusters
                if late is not None:
                    gradient = gradient + late.mean[n] - late.own[m][n] / num_clusters
                    self.own_buffer[m][n] += before.get(n, 0.0)
                self.own_anchor[m][n] -= self.outer_update(self.own_buffer[m][n], gradient)
                theta[n].copy_(self.own_anchor[m][n])
        if late is None:
            self.clock.under_way[p] = 0

    def outer_update(self, buffer: Tensor, gradient: Tensor) -> Tensor:
        recipe = self.recipe
        if callable(recipe.rule):
            return recipe.rule(buffer, gradient, recipe)
        if recipe.rule == "sgd":
            return recipe.eta * gradient
        buffer.copy_(recipe.mu * buffer + gradient)
        direction = buffer if recipe.rule == "momentum" else gradient + recipe.mu * buffer
        if recipe.clip is not None:
            direction = direction.clamp(-recipe.clip, recipe.clip)
        return recipe.eta * direction

    def penalised(self, n: str, flight: Flight) -> Tensor:
        """CO2, eq. 3: D / L with L = |last update| / (H * |first step of the round|) + 1."""
        if self.recipe.penalty is None:
            return flight.mean[n]
        moved = self.last_update.get(n, torch.zeros_like(flight.first_step[n]))
        reach = flight.interval * flight.first_step[n]
        gap = torch.where(moved == 0, torch.zeros_like(moved), moved / reach) + 1
        return flight.mean[n] / gap

    def size(self, x: Tensor) -> Tensor:
        return x.norm() if self.recipe.penalty == "tensor" else x.abs()

    def observe_first_steps(self, step: int) -> None:
        if self.recipe.penalty is None:
            return
        for p, launched in enumerate(self.clock.launched):
            if launched == step - 1:
                for n in self.recipe.fragments[p]:
                    sizes = [
                        self.size(theta[n] - start[n])
                        for theta, start in zip(self.local, self.start, strict=True)
                    ]
                    self.first_step[n] = sum(sizes) / len(sizes)  # type: ignore[assignment]


def train_reference(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    compute_loss: Callable[[nn.Module, int, int], Tensor],
    recipe: Recipe,
    num_clusters: int,
    num_steps: int,
    skipped: Sequence[tuple[int, int]] = (),
    finished_at: Sequence[int] = (),
) -> tuple[list[Tensors], Tensors]:
    """Return every cluster's parameters and the anchor after `num_steps` inner steps.

    `compute_loss(model, cluster, step)` gives the loss of one inner step (from 1); a pair
    `(cluster, step)` in `skipped` is an overflow step: counted, not taken. After the steps in
    `finished_at` everything under way is applied. The anchor is empty where parameters are
    averaged.
    """
    models = [copy.deepcopy(model) for _ in range(num_clusters)]
    optimizers = [make_optimizer(m) for m in models]
    local = [dict(m.named_parameters()) for m in models]
    if recipe.adaptive is not None:
        recipe.adaptive.restart(len(recipe.fragments))
    clock = Clock(len(recipe.fragments))
    with torch.no_grad():
        reference = Reference(recipe, local, clock)  # type: ignore[arg-type]
    for step in range(1, num_steps + 1):
        before = [{n: p.detach().clone() for n, p in theta.items()} for theta in local]
        for m, (net, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            compute_loss(net, m, step).backward()
            if (m, step) not in skipped:
                optimizer.step()
        with torch.no_grad():
            reference.boundary(step, before)
            if step in finished_at:
                reference.finish(step)
    anchor = {} if recipe.delay == "average" else reference.anchor
    return [{n: p.detach().clone() for n, p in theta.items()} for theta in local], anchor
