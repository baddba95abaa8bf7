"""Warm starts on disk: in codes, and read from files of format 10, which have them in fp32."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dsx.checkpoint.checksums import checksum, note_checksum
from dsx.checkpoint.files import rank_file
from dsx.config.schema import resolve_method
from tests.checkpoint.test_reshard import through_shards
from tests.checkpoint.test_state_dtype import go_on, require_the_same, save, start, train
from tests.compress.test_over_gloo import WideNet
from tests.simulated import Simulated

EVERY: dict[str, Any] = {"schedule": {"interval": 3}}
pytestmark = pytest.mark.filterwarnings("ignore::dsx.SettingWarning")


def tensors_of(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def as_format_10(base: Path) -> int:
    """Write warm starts as they were, in fp32; return how many there are in all files."""
    found = 0
    for path in sorted(base.glob("*/dsx_rank_*.safetensors")):
        with safe_open(path, "pt") as file:
            meta = json.loads(file.metadata()["dsx"])
        assert meta["format"] == 11
        tensors = tensors_of(path)
        for name in [name for name in tensors if "codec.q_scale." in name]:
            scales, kept = tensors.pop(name), name.replace("q_scale", "q")
            assert tensors[kept].dtype == torch.int8
            tensors[kept], found = tensors[kept] * scales, found + 1
        text = json.dumps({**meta, "format": 10})
        save_file(tensors, path, {"dsx": text})
        note_checksum(path, checksum(path))
    return found


def trained(steps: int = 0) -> tuple[Simulated, dict[str, Any]]:
    run, axes = start("dilocox", EVERY)
    train(run, steps)
    return run, axes


def factored(factor_wire: str, steps: int = 0) -> tuple[Simulated, dict[str, Any]]:
    compression = {"type": "low_rank", "rank": 2, "min_saving": 1.0, "factor_wire": factor_wire}
    method, axes = resolve_method("diloco", {**EVERY, "compression": compression}, 2)
    sgd = partial(torch.optim.SGD, lr=0.1)
    run = Simulated(WideNet(), lambda model: sgd(model.parameters()), method, 2)
    train(run, steps)
    return run, axes


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_file_of_format_10_goes_on_to_the_bit(is_sharded: bool, tmp_path: Path) -> None:
    """With the state of before what came last, too: a transfer is under way."""
    whole, _ = trained(14)
    (first, axes), (second, _) = trained(8), trained()
    save(first, axes, base := tmp_path / "saved")
    names = tensors_of(rank_file(base / "0", 0)).keys()
    matrices = [name for name in names if "codec.q." in name]
    assert any(name.startswith("before.") for name in matrices)
    assert as_format_10(base) == 2 * len(matrices)
    if is_sharded:
        through_shards(first, base, tmp_path / "sharded")
        base = tmp_path / "sharded"
        axes = {}
    go_on(second, first, axes, base)
    train(second, 6)
    require_the_same(second, whole)


def test_a_file_has_the_codes_and_their_scales(tmp_path: Path) -> None:
    run, axes = trained(8)
    save(run, axes, tmp_path)
    saved = tensors_of(rank_file(tmp_path / "0", 0))
    for fragment in run.loops[0].adapter.fragments:
        slots = run.loops[0].state.channels[fragment.id].codec.slots
        names = [name for name in slots if name.startswith(("q.", "q_scale."))]
        assert len(names) == 2 and slots[names[0]].any()
        for name in names:
            assert torch.equal(saved[f"codec.{name}/{fragment.id}"], slots[name])


@pytest.mark.parametrize(("before", "after"), [("int4", "fp32"), ("fp32", "int8")])
def test_factors_in_another_format_start_from_the_same_directions(
    before: str, after: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Codes are taken to their values, and values to codes, the same in all clusters."""
    (first, axes), (second, others) = factored(before, 8), factored(after)
    save(first, axes, tmp_path)
    go_on(second, first, others, tmp_path)
    assert "compression.factor_wire" in caplog.text
    kept = [run.loops[0].state.channels[0].codec.slots for run in (first, second)]
    for name in [name for name in kept[0] if name.startswith("q.")]:
        scale = name.replace("q.", "q_scale.", 1)
        ours, theirs = (slots[name] * slots.get(scale, torch.ones(1)) for slots in kept)
        assert ours.dtype == theirs.dtype == torch.float32 and ours.any()
        assert before == "fp32" or torch.equal(ours, theirs)
        assert float((ours - theirs).norm()) <= 0.01 * float(ours.norm())
    train(second, 6)
    for a, b in zip(second.loops[0].state.anchor, second.loops[1].state.anchor, strict=True):
        assert torch.equal(a, b)
