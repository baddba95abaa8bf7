"""Saves of the Trainer, Lightning and Accelerate beside training, their copies, and back from them.

Unmodified scripts, trained to the end, then killed in the midst of a save that is written beside
training, and started anew on an empty disk: the same bits.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dsx.checkpoint.checksums import MANIFEST, find_damage
from dsx.checkpoint.remote import Remote
from dsx.telemetry.run_folder import read_about
from tests.distributed import free_port
from tests.installed import needs
from tests.run.launching import run, start, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
HERE = Path(__file__).parent
SLOWLY = HERE / "saving_slowly.py"
BLOCK = {
    "preset": "streaming_diloco",
    "schedule": {"interval": 2},
    "fragments": {"num_fragments": 2},
    "delay": {"steps": 1},
}


@dataclass(frozen=True)
class Kind:
    """A script, how it is started and resumed, and where its checkpoints lie."""

    script: str
    options: tuple[Any, ...]
    resume: tuple[Any, ...]
    killed_in: str  # whose save is cut short, the third
    kept: str  # what the library leaves of cluster 0's
    num_kept: int
    last: int  # the step of the last save


def config_of(at: Path, is_beside: bool = True) -> Path:
    """Write a config; both clusters copy to one place."""
    checkpoints = {"beside_training": is_beside, "remote": f"file://{at}/far"}
    block = {**BLOCK, "clusters": {"num_clusters": 2}, "checkpoints": checkpoints}
    document = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto", "zero_optimization": {"stage": 1}, "dsx": block,
    }  # fmt: skip
    (at / "ds.json").write_text(json.dumps(document))
    plain = {**document, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    del plain["train_batch_size"]
    (at / "plain.json").write_text(json.dumps(plain))
    return at / "ds.json"


TRAINER = Kind(
    "train_with_trainer.py",
    ("--deepspeed", "ds.json", "--output_dir", "runs", "--out", "final", "--max_steps", 9,
     "--per_device_train_batch_size", 2, "--learning_rate", 0.01, "--max_grad_norm", 0,
     "--lr_scheduler_type", "linear", "--logging_steps", 2, "--report_to", "none",
     "--disable_tqdm", "True", "--seed", 0, "--save_strategy", "steps", "--save_steps", 2,
     "--save_total_limit", 2, "--dataloader_pin_memory", "False"),
    ("--resume_from_checkpoint", "True"),
    "checkpoint-6", "runs/cluster_0/checkpoint-*", 2, 9,
)  # fmt: skip
LIGHTNING = Kind(
    "train_with_lightning.py",
    ("--devices", 1, "--max_steps", 9, "--every", 2, "--root", "runs", "--top_k", 1,
     "--cluster", "{cluster_id}", "--out", "final.ckpt"),
    ("--resume", "last"),
    "step=6.ckpt", "runs/ck/cluster_0/*.dsx", 2, 8,
)  # fmt: skip
ACCELERATE = Kind(
    "train_with_accelerate.py",
    ("--out", "runs", "--steps_between", 8, "--told", "told_{cluster_id}"),
    ("--resume", "runs/step_{step}"),
    "step_24", "runs/step_*/cluster_0", 4, 32,
)  # fmt: skip


def launch(kind: Kind, at: Path, *more: Any, ranks: int = 2, slow: str = "") -> Any:
    command = [
        "python", "-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-port",
        free_port(), "-m", "dsx.run", "--dsx-config", at / "plain.json",
        "--dsx-metrics-dir", at / "record", SLOWLY, HERE / kind.script, *kind.options, *more,
    ]  # fmt: skip
    if kind is TRAINER:
        del command[9:11]  # its block is in the DeepSpeed JSON
    own = {"ACCELERATE_USE_CPU": "true"} if kind is ACCELERATE else {}
    return command, {"SLOW_FROM": slow, **own}


def train(kind: Kind, at: Path, *more: Any, ranks: int = 2) -> str:
    ((status, output),) = run(launch(kind, at, *more, ranks=ranks), at=at)
    assert status == 0, output
    return output


def kill_in_a_save(kind: Kind, at: Path) -> int:
    """Start, and kill all ranks while an outer state is being written; return the step that is
    whole at the remote place.
    """
    log = at / "killed.log"
    command, environ = launch(kind, at, slow=kind.killed_in)
    launcher = start(command, log, **environ)
    try:
        wait_for(launcher, log, "WRITES", 200)
        until = time.monotonic() + 60
        while not (steps := common_steps(at)):
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
    finally:
        told = subprocess.run(
            ["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
        )
        parents = {int(pid): int(of) for pid, of in map(str.split, told.stdout.splitlines())}
        ranks = [pid for pid, of in parents.items() if of == launcher.pid]
        for pid in (launcher.pid, *ranks):
            os.kill(pid, signal.SIGKILL)
        launcher.wait(30)
    return max(steps)


def common_steps(at: Path) -> set[int]:
    """Return the steps of what both clusters have at the remote place, whole."""
    remote = Remote(f"file://{at}/far", "here")
    found = [{tag["step"] for tag in remote.tags(cluster).values()} for cluster in range(2)]
    return found[0] & found[1]


def require_whole(at: Path) -> None:
    """Fail unless all that says it is complete, on the disk and at the remote place, is."""
    folders = [path.parent for path in at.rglob(MANIFEST)]
    assert folders
    assert [find_damage(folder) for folder in folders] == [None] * len(folders)


def models(kind: Kind, at: Path) -> list[Any]:
    """Return what each cluster has at the end."""
    if kind is TRAINER:
        from safetensors.torch import load_file

        folders = (at / "runs" / f"cluster_{m}" for m in range(2))
        loaded = [load_file(folder / "model.safetensors") for folder in folders]
        return [{name: tensor.tolist() for name, tensor in one.items()} for one in loaded]
    if kind is LIGHTNING:
        files = [at / "runs" / f"told_{m}" / "0.json" for m in range(2)]
        return [json.loads(file.read_text())["weights"] for file in files]
    files = [at / f"told_{m}.0.json" for m in range(2)]
    return [json.loads(file.read_text())["after"] for file in files]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(TRAINER, marks=needs("deepspeed", "transformers", "accelerate", "datasets")),
        pytest.param(LIGHTNING, marks=needs("lightning")),
        pytest.param(ACCELERATE, marks=needs("accelerate")),
    ],
    ids=["trainer", "lightning", "accelerate"],
)
def test_killed_in_a_save_beside_training_and_gone_on_from_copies(
    kind: Kind, tmp_path: Path
) -> None:
    config_of(tmp_path)
    train(kind, tmp_path)
    whole, far = models(kind, tmp_path), tmp_path / "far"
    assert whole[0] == whole[1]
    require_whole(tmp_path)
    assert kind.last in common_steps(tmp_path)  # its end waits for the last copy
    kept = {path.relative_to(tmp_path) for path in tmp_path.glob(kind.kept)}
    assert len(kept) == kind.num_kept, kept  # what was put off is deleted as it ends
    for about in read_about(tmp_path / "record").values():
        assert any("copied_to" in entry for entry in about["checkpoints"]), about
    for place in ("runs", "far", "record"):
        shutil.rmtree(tmp_path / place)

    step = kill_in_a_save(kind, tmp_path)
    assert 0 < step < kind.last
    cut = [path for path in (tmp_path / "runs").rglob("*") if kind.killed_in in path.name]
    assert cut and not any((path / MANIFEST).exists() for path in cut)
    require_whole(tmp_path)
    shutil.rmtree(tmp_path / "runs")  # a new machine
    output = train(kind, tmp_path, *(part.format(step=step) for part in kind.resume))
    assert f"{far}/cluster_0/" in output and "is fetched" in output
    assert models(kind, tmp_path) == whole
    require_whole(tmp_path)
    left = {path.relative_to(tmp_path) for path in tmp_path.glob(kind.kept)}
    if kind is TRAINER:
        assert left == kept
