"""Plain Megatron-LM into clusters and back, in a tree: `--megatron-lm=PATH -m slow`."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests.distributed import free_port
from tests.launch import test_megatron_lm
from tests.launch.test_megatron_lm import BIN, BLOCKING, DRIVER, MODEL, environment, pretrain

tree = test_megatron_lm.tree  # the fixture
PLAIN, ACROSS, END = 10, 17, 20  # iterations
SCHEDULE = shlex.split(f"--lr-decay-style linear --lr-decay-iters {END}")
AT_ONCE = shlex.split("--use-checkpoint-opt_param-scheduler --save-interval 100")
BATCH = 8  # samples that one world, or one cluster, reads in a step
KINDS = {
    "torch_dist": ["--ckpt-format", "torch_dist", "--bf16"],
    "pipeline": ["--ckpt-format", "torch_dist", "--bf16", "--pipeline-model-parallel-size", "2"],
    "torch": ["--ckpt-format", "torch"],
}


def train(to: int, last: int = END) -> list[str]:
    """Return the arguments of a run that ends at an iteration, as part of a longer one."""
    return [
        *SCHEDULE,
        "--train-iters",
        str(last),
        *(["--exit-interval", str(to)] if to < last else []),
    ]


def plain(
    tree: Path, log: Path, *arguments: Any, ranks: int = 1, script: str = "pretrain_gpt.py"
) -> str:
    """Run plain Megatron; return its output."""
    launcher = [BIN / "torchrun", "--nproc-per-node", ranks, "--master-port", free_port()]
    command = [*launcher, DRIVER, tree / script, *MODEL, *arguments]
    with log.open("wb") as file:
        status = subprocess.run(
            [str(word) for word in command],
            env=environment(tree), stdout=file, stderr=subprocess.STDOUT, timeout=400,
        ).returncode  # fmt: skip
    assert status == 0, log.read_text()[-3000:]
    return log.read_text()


def flat(prefix: str, value: Any, found: dict[str, Any]) -> None:
    if type(value).__name__ == "Namespace":
        value = {name: getattr(value, name) for name in ("consumed_train_samples",)}
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            flat(f"{prefix}/{key}", inner, found)
    elif "rng_state" not in prefix:  # a loader's first look draws a number, in plain Megatron, too
        found[prefix] = value if isinstance(value, torch.Tensor) else str(value)


def held(save: Path, iteration: int) -> dict[str, Any]:
    """Return what a checkpoint of Megatron's holds, by name."""
    directory, found = save / f"iter_{iteration:07d}", dict[str, Any]()
    for file in [*directory.glob("common.pt"), *sorted(directory.glob("mp_rank_*/*.pt"))]:
        where = str(file.relative_to(directory))
        flat(where, torch.load(file, weights_only=False), found)
    if (directory / ".metadata").is_file():
        tensors: dict[str, Any] = {}
        reader, planner = dcp.FileSystemReader(directory), _EmptyStateDictLoadPlanner()
        _load_state_dict(tensors, storage_reader=reader, planner=planner, no_dist=True)
        flat("dist", tensors, found)
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    def is_equal(name: str) -> bool:
        a, b = one.get(name), other.get(name)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        return type(a) is type(b) and a == b

    assert any(isinstance(value, torch.Tensor) and value.any() for value in one.values())
    return [name for name in sorted({*one, *other}) if not is_equal(name)]


def counted(text: str) -> dict[int, int]:
    found = re.findall(r"iteration\s+(\d+)/.*?consumed samples:\s+(\d+)", text)
    return {int(iteration): int(samples) for iteration, samples in found}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_changes_where_dsx_comes_and_goes(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(test_megatron_lm, "DSX", BLOCKING)
    given, ranks = KINDS[kind], 2 if kind == "pipeline" else 1
    logs, first = tmp_path / "logs", tmp_path / "plain"
    logs.mkdir()
    every = ["--save-interval", str(ACROSS)]

    plain(tree, logs / "plain", *given, *train(PLAIN), *every, "--save", first, ranks=ranks)
    before = held(first, PLAIN)

    load = ["--load", str(first)]
    save = ["--save", str(tmp_path / "at_once/{cluster_id}")]
    pretrain(tree, logs / "in", *given, *train(PLAIN, PLAIN), *AT_ONCE, *load, *save, ranks=ranks)
    for cluster in range(2):
        assert differences(held(tmp_path / f"at_once/{cluster}", PLAIN), before) == []

    save = ["--save", str(tmp_path / "{cluster_id}")]
    texts = pretrain(
        tree, logs / "across", *given, *train(ACROSS), *every, *load, *save, ranks=ranks
    )
    for text in texts:
        assert f"begins from {first}, iteration {PLAIN} of a run without dsx: weights, " in text
        assert f"samples behind the first {BATCH * PLAIN} this cluster reads part" in text
    place = BATCH * (PLAIN + 2 * (ACROSS - PLAIN))  # of both clusters together

    own = tmp_path / "0"
    load, save = ["--load", own], ["--save", tmp_path / "back"]
    plain(tree, logs / "back", *given, *train(ACROSS, ACROSS), *AT_ONCE, *load, *save, ranks=ranks)
    assert differences(held(tmp_path / "back", ACROSS), held(own, ACROSS)) == []
    text = plain(tree, logs / "on", *given, *train(END), *load, ranks=ranks)
    steps = END - ACROSS
    assert counted(text) == {ACROSS + n: place + n * BATCH for n in range(1, steps + 1)}

    load = ["--load", str(tmp_path / "{cluster_id}")]
    for text in pretrain(tree, logs / "resumed", *given, *train(END), *load, ranks=ranks):
        assert f"goes on from iteration {ACROSS}" in text and "begins from" not in text
        assert counted(text) == {ACROSS + n: BATCH * (ACROSS + n) for n in range(1, steps + 1)}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_cluster_goes_on_as_plain_megatron(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit up to the first outer step, which with one cluster changes weights, too."""
    late = shlex.split("--dsx-preset diloco --dsx-schedule-interval 100")
    monkeypatch.setattr(test_megatron_lm, "DSX", late)
    given, first = [*KINDS["torch_dist"], "--save-interval", "100"], tmp_path / "plain"
    plain(tree, tmp_path / "log", *given, *train(PLAIN), "--save", first)
    load = ["--load", str(first)]
    on = plain(tree, tmp_path / "on", *given, *train(END), *load)
    (one,) = pretrain(tree, tmp_path / "one", *given, *train(END), *load, clusters=1, ranks=1)
    for what in ("lm loss", "grad norm"):
        assert test_megatron_lm.logged(one, what) == test_megatron_lm.logged(on, what)
    assert len(test_megatron_lm.logged(on, "lm loss")) == END - PLAIN
