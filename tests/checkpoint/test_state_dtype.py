"""Outer state that is kept in fewer bits: saved as it is, and translated where that is another."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from dsx.checkpoint.files import rank_file
from dsx.checkpoint.outer_state import load_state
from dsx.comm.topology import RankInfo
from dsx.config.schema import resolve_method
from tests.checkpoint.saved import save_state
from tests.checkpoint.test_reshard import save_all, through_shards
from tests.compress.test_over_gloo import WideNet, loss
from tests.reference_rounding import rounded
from tests.simulated import Simulated
from tests.tiny import TinyNet, mean_loss

BF16 = {"outer_optimizer": {"state_dtype": "bf16"}}
EVERY: dict[str, Any] = {"schedule": {"interval": 3}}
LOW_RANK: dict[str, Any] = {
    "control": {
        "rank": 4, "max_rank": 6, "min_interval": 2, "window": 2,
        "step_seconds": 1.0, "round_seconds": 1.0,
    },
    "compression": {"dense_rounds": 1},
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore::dsx.SettingWarning")


def start(preset: str, *overrides: dict[str, Any]) -> tuple[Simulated, dict[str, Any]]:
    given: dict[str, Any] = {}
    for more in (*overrides, LOW_RANK if preset == "dilocox" else {}):
        for axis, values in more.items():
            given[axis] = {**given.get(axis, {}), **values}
    method, axes = resolve_method(preset, given, 2)
    model = WideNet() if preset == "dilocox" else TinyNet()
    run = Simulated(model, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), method, 2)
    return run, axes


def save(run: Simulated, axes: dict[str, Any], base: Path) -> None:
    for m, loop in enumerate(run.loops):
        save_state(loop, base / f"{m}", RankInfo(m, 2, 0, 1), "run-a", axes, {})


def go_on(run: Simulated, first: Simulated, axes: dict[str, Any], base: Path) -> None:
    for m, loop in enumerate(run.loops):
        run.models[m].load_state_dict(first.models[m].state_dict())
        run.optimizers[m].load_state_dict(copy.deepcopy(first.optimizers[m].state_dict()))
        load_state(loop, base / f"{m}", RankInfo(m, 2, 0, 1), axes)


def train(run: Simulated, num_steps: int) -> None:
    wide = isinstance(run.models[0], WideNet)
    for _ in range(num_steps):
        run.train_step(loss if wide else mean_loss)


def told(caplog: pytest.LogCaptureFixture) -> set[str]:
    return {m.partition(" was saved with ")[2] for m in caplog.messages if "was saved with" in m}


def momenta(run: Simulated) -> list[torch.Tensor]:
    return [slots.outer["momentum"] for slots in run.loops[0].state.slots]


def require_the_same(ours: Simulated, theirs: Simulated) -> None:
    for a, b in zip(ours.loops, theirs.loops, strict=True):
        for fragment in range(a.history.num_fragments):
            state, expected = a.state.named_state(fragment), b.state.named_state(fragment)
            assert all(torch.equal(state[n], expected[n]) for n in expected)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert all(torch.equal(a[n], b[n]) for n in b)


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("preset", ["eager", "slowmo", "dilocox"])
def test_a_resumed_run_rounds_as_one_that_was_not_stopped(
    preset: str, is_sharded: bool, tmp_path: Path
) -> None:
    """Eager keeps a momentum of its look-ahead, too; also through files of four ranks."""
    (whole, _), (first, _), (second, _) = (start(preset, BF16, EVERY) for _ in range(3))
    train(whole, 13)
    train(first, 7)
    save_all(first, tmp_path / "whole")
    if is_sharded:
        through_shards(first, tmp_path / "whole", tmp_path / "sharded")
    for m, loop in enumerate(second.loops):
        second.models[m].load_state_dict(first.models[m].state_dict())
        second.optimizers[m].load_state_dict(copy.deepcopy(first.optimizers[m].state_dict()))
        base = tmp_path / ("sharded" if is_sharded else "whole") / f"{m}"
        load_state(loop, base, RankInfo(m, 2, 0, 1), {})
    train(second, 6)
    require_the_same(second, whole)
    kept = {n: t.dtype for n, t in whole.loops[0].state.slots[0].named().items()}
    assert kept["outer.momentum"] == torch.bfloat16
    assert preset != "eager" or kept["delay.momentum"] == torch.bfloat16


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_momentum_saved_in_fp32_goes_on_as_the_nearest_in_bf16_and_back(
    is_sharded: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, axes = start("diloco", EVERY)
    train(first, 7)
    save(first, axes, tmp_path / "fp32")
    base = tmp_path / "fp32"
    short, short_axes = start("diloco", BF16, EVERY)
    if is_sharded:
        base = tmp_path / "shards"
        through_shards(first, tmp_path / "fp32", base)
    go_on(short, first, short_axes if not is_sharded else {}, base)
    for ours, theirs in zip(momenta(short), momenta(first), strict=True):
        assert torch.equal(ours, theirs.bfloat16()) and theirs.abs().max() > 0
    if not is_sharded:
        assert told(caplog) == {"outer_optimizer.state_dtype=fp32; going on with bf16"}
    train(short, 5)
    caplog.clear()
    save(short, short_axes, tmp_path / "bf16")
    again, _ = start("diloco", EVERY)
    go_on(again, short, axes, tmp_path / "bf16")
    for ours, theirs in zip(momenta(again), momenta(short), strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours, theirs.float())
    assert told(caplog) == {"outer_optimizer.state_dtype=bf16; going on with fp32"}


def test_a_file_that_knows_no_such_setting_is_of_fp32(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, axes = start("diloco", EVERY)
    older = {name: dict(choice) for name, choice in axes.items()}
    del older["outer_optimizer"]["state_dtype"]
    save(run, older, tmp_path)
    go_on(run, run, axes, tmp_path)
    assert told(caplog) == set()
    go_on(start("diloco", BF16, EVERY)[0], run, start("diloco", BF16, EVERY)[1], tmp_path)
    assert told(caplog) == {"outer_optimizer.state_dtype=fp32; going on with bf16"}


@pytest.mark.parametrize("storages", [("fp32", "int8"), ("int8", "fp32"), ("bf16", "int8")])
def test_residuals_saved_in_another_format_are_coded_anew(
    storages: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With transfers under way; all else is as it was, to the bit."""
    (first, axes), (second, other) = (
        start("dilocox", EVERY, {"compression": {"error_feedback": s}}) for s in storages
    )
    train(first, 9)
    assert first.loops[0].in_flight
    save(first, axes, tmp_path)
    go_on(second, first, other, tmp_path)
    before, after = storages
    assert f"compression.error_feedback={before}; going on with {after}" in told(caplog)
    step = {"fp32": 0.0, "bf16": 2**-8, "int8": 1 / 127}
    for ours, theirs in zip(second.loops, first.loops, strict=True):
        for fragment in range(ours.history.num_fragments):
            errors = [x.state.channels[fragment].codec.errors for x in (ours, theirs)]
            for name, error in errors[0].items():
                expected = errors[1][name].residual.read()
                assert error.residual.storage == after
                apart = (error.residual.read() - expected).abs().max()
                largest = expected.abs().max()
                assert largest > 0 and apart <= step[after] * largest
            state, kept = (x.state.named_state(fragment) for x in (ours, theirs))
            coded = {f"codec.{name}" for name in errors[0]}  # the check's memory begins anew
            names = kept.keys() - coded - {"parity_check.memory"}
            assert "anchor" in names and all(torch.equal(state[n], kept[n]) for n in names)
    train(second, 4)
    alike = zip(*(loop.state.anchor for loop in second.loops), strict=True)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in alike)


def test_a_momentum_in_bf16_takes_two_bytes_of_a_file(tmp_path: Path) -> None:
    run, axes = start("diloco", BF16, EVERY)
    train(run, 4)
    save(run, axes, tmp_path)
    numel = run.loops[0].adapter.fragments[0].numel
    with safe_open(rank_file(tmp_path / "0", 0), "pt") as file:
        momentum = file.get_tensor("outer.momentum/0")
        assert file.get_tensor("anchor/0").nbytes == 4 * numel
    assert momentum.dtype == torch.bfloat16 and momentum.nbytes == 2 * numel
    # and it is not the nearest of anything: what is rounded again stays
    assert torch.equal(rounded(momentum.float(), "outer.momentum", "x", 1), momentum.float())
