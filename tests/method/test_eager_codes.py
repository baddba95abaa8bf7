"""Eager overlap in codes: a cluster goes on from what the wire carries of it, not from more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsx.config.schema import preset
from dsx.outer.transfer import Transfer
from tests.compress.test_over_gloo import WideNet, adamw, loss
from tests.reference import Recipe, train_reference
from tests.simulated import Simulated

EVERY_3 = {"interval": 3}
CODES: dict[str, dict[str, Any]] = {
    "int4": {"type": "quantized"},
    "int4, feedback": {"type": "quantized", "error_feedback": "fp32"},
    "int8, feedback in int8": {"type": "quantized", "wire": "int8", "error_feedback": "int8"},
    "stochastic": {"type": "quantized", "rounding": "stochastic", "error_feedback": "bf16"},
    "ternary": {"type": "quantized", "wire": "ternary", "error_feedback": "fp32"},
    "top-k": {"type": "top_k", "k": 32, "chunk": 1024},
    "random top-k": {"type": "random_top_k", "random_ratio": 0.5, "chunk": 256},
}
FEEDBACK = CODES["int4, feedback"] | {"small_wire": "fp32"}
ALL = [name for name, _ in WideNet().named_parameters()]


def new_run(name: str, num_clusters: int, **overrides: Any) -> Simulated:
    own = {"schedule": EVERY_3, "outer_optimizer": {"lr": 0.3, "momentum": 0.9}} | overrides
    return Simulated(WideNet(), adamw, preset(name, num_clusters, **own), num_clusters)


def trained(name: str, num_clusters: int, num_steps: int = 12, **overrides: Any) -> Simulated:
    run = new_run(name, num_clusters, **overrides)
    for _ in range(num_steps):
        run.train_step(loss)
    return run


@pytest.mark.parametrize("codec", CODES)
def test_one_cluster_alone_is_diloco_to_the_bit(codec: str) -> None:
    """All of the mean is its own: nothing is late, and nothing is looked ahead to otherwise."""
    (ours,) = trained("eager", 1, compression=CODES[codec]).parameters()
    (theirs,) = trained("diloco", 1, compression=CODES[codec]).parameters()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    (exact,) = trained("diloco", 1).parameters()
    assert any(not torch.equal(ours[name], exact[name]) for name in exact)


def scaled(x: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Groups of 64 values, and their scales: the largest over `most`, rounded up to bf16."""
    groups = x.reshape(-1, 64)
    largest = groups.abs().amax(dim=1, keepdim=True)
    scale = (largest / most).bfloat16().float()
    above = torch.nextafter(scale.bfloat16(), torch.tensor(torch.inf).bfloat16()).float()
    scale = torch.where(scale * most < largest, above, scale)
    return groups / scale, scale


def int4(x: Tensor) -> Tensor:
    """Whole numbers up to 7; vectors as they are."""
    if x.dim() < 2:
        return x
    codes, scale = scaled(x, 7.0)
    return ((codes + 0.5).floor() * scale).reshape(x.shape)


def fp4_e3m0(x: Tensor) -> Tensor:
    """The nearest of 0 and the powers of two up to 64; vectors as they are."""
    if x.dim() < 2:
        return x
    codes, scale = scaled(x, 64.0)
    grid = torch.tensor([0.0, *(2.0**power for power in range(7))])
    nearest = (codes.abs()[..., None] - grid).abs().argmin(dim=-1)
    return (codes.sign() * grid[nearest] * scale).reshape(x.shape)


@pytest.mark.parametrize("num_clusters", [2, 3, 4])
@pytest.mark.parametrize(("name", "outer_steps"), [("eager", 1), ("eager_2", 2), ("eager_fp4", 1)])
def test_codes_are_the_papers_contributions(name: str, outer_steps: int, num_clusters: int) -> None:
    """Alg. 3 with D_k^m as decoded, each cluster with an anchor of its own, in plain torch."""
    as_preset = name == "eager_fp4"
    codes = {"small_wire": "fp32"} if as_preset else FEEDBACK
    run = trained(
        name, num_clusters, compression=codes | {"mean_wire": "fp32"},
        outer_optimizer={"lr": 0.2, "momentum": 0.8},
    )  # fmt: skip
    recipe = Recipe(
        [ALL], 3, False, 0, 1.0, "nesterov", 0.2, 0.8, delay="eager", outer_steps=outer_steps,
        code=fp4_e3m0 if as_preset else int4, feedback=not as_preset,
    )  # fmt: skip
    expected, _ = train_reference(WideNet(), adamw, loss, recipe, num_clusters, 12)
    for ours, theirs in zip(run.parameters(), expected, strict=True):
        assert max((ours[n] - theirs[n]).abs().max().item() for n in theirs) < 2e-5


def under_way(run: Simulated, cluster: int) -> Transfer:
    transfer = run.loops[cluster].in_flight[-1]
    assert isinstance(transfer, Transfer)
    return transfer


@pytest.mark.parametrize(("num_clusters", "feedback"), [(2, "fp32"), (4, "none"), (4, "fp32")])
def test_owners_codes_of_the_mean_are_all_that_differs(num_clusters: int, feedback: str) -> None:
    """Of equal clusters the mean is the share; from four on it is rounded to int8 once more.

    With feedback what was lost the round before, half a step of its own, is in the mean as well.
    """
    codes = FEEDBACK | {"error_feedback": feedback}
    run = new_run("eager", num_clusters, compression=codes)
    for _ in range(9):
        run.train_step(lambda model, cluster, step: loss(model, 0, step))
    transfer = under_way(run, 0)
    share, mean = transfer.buffers.kept, transfer.pending.wait()
    assert share is not None and share.abs().max() > 0
    difference = (mean - share).abs().max().item()
    if num_clusters == 2:
        assert difference == 0
    else:
        step = 1.01 * share.abs().max().item() / 127
        assert 0 < difference <= (step / 2 if feedback == "none" else 1.5 * step)


def test_only_eager_methods_encode_at_the_launch() -> None:
    """The others leave it to the transfer's thread, which here runs once all have launched."""

    def lost(name: str) -> bool:
        run = trained(name, 2, 2, compression=FEEDBACK)
        run.loops[0].launch_due()
        named = run.loops[0].state.channels[0].codec.slots
        return any(bool(slot.any()) for slot in named.values())

    assert lost("eager") and not lost("diloco") and not lost("diloco_delayed")


def test_what_a_refused_round_carried_is_sent_again() -> None:
    """Cluster 1 sends a NaN: the other's share goes back to its residual, before the next is made.

    Encoded when nobody knew, and the residual it has spent with it.
    """
    run = trained("eager", 2, 5, compression=FEEDBACK)
    read = run.loops[1].adapter.read

    def read_nan(fragment: int, out: Tensor, start: int = 0) -> None:
        read(fragment, out, start)
        out[0] = float("nan")

    run.loops[1].adapter.read = read_nan  # type: ignore[method-assign]
    run.train_step(loss)
    run.loops[1].adapter.read = read  # type: ignore[method-assign]
    share = under_way(run, 0).buffers.kept
    assert share is not None
    share = share.clone()
    residuals = run.loops[0].state.channels[0].codec.errors
    for _ in range(2):
        run.train_step(loss)
    run.loops[0].launch_due()
    run.loops[1].launch_due()
    before = {name: error.residual.read() for name, error in residuals.items()}
    for loop in run.loops:
        loop.apply_ripe()
        assert loop.totals.refused == 1
    for name, error in residuals.items():
        expected = before[name] + share[error.start : error.stop]
        assert torch.equal(error.residual.read(), expected) and expected.any()
    own = run.loops[1].state.channels[0].codec.errors
    assert all(error.residual.read().isfinite().all() for error in own.values())
    assert all(p.isfinite().all() for model in run.models for p in model.parameters())
