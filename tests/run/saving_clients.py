"""Scripts of each client that save beside training: how they are run, killed in a save, resumed.

`KINDS` by name: what is between a script and its ranks (DDP, FSDP2, DeepSpeed, nothing), two
clusters of one rank or of two. Both clusters copy to one remote place.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsx.checkpoint.checksums import MANIFEST, find_damage
from dsx.checkpoint.remote import Remote
from tests.distributed import free_port
from tests.run.launching import run, start, wait_for

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

    needs: tuple[str, ...]
    script: str
    options: tuple[Any, ...]
    resume: tuple[Any, ...]
    killed_in: str  # what of a save's path is of the one that is cut short, the third
    kept: str  # what the library leaves of cluster 0's
    num_kept: int
    last: int  # the step of the last save
    ranks: int = 2  # of both clusters
    stage: int = 1  # of DeepSpeed's ZeRO
    before: tuple[str, ...] = ("-m", "dsx.run", "--dsx-config", "plain.json")
    around: tuple[str, ...] = ()  # a script that runs the script
    environ: dict[str, str] = field(default_factory=dict)


_TRAINER = Kind(
    ("deepspeed", "transformers", "accelerate", "datasets"),
    "train_with_trainer.py",
    ("--deepspeed", "ds.json", "--output_dir", "runs", "--out", "final", "--max_steps", 9,
     "--per_device_train_batch_size", 2, "--learning_rate", 0.01, "--max_grad_norm", 0,
     "--lr_scheduler_type", "linear", "--logging_steps", 2, "--report_to", "none",
     "--disable_tqdm", "True", "--seed", 0, "--save_strategy", "steps", "--save_steps", 2,
     "--save_total_limit", 2, "--dataloader_pin_memory", "False"),
    ("--resume_from_checkpoint", "True"),
    "checkpoint-6", "runs/cluster_0/checkpoint-*", 2, 9, before=("-m", "dsx.run"),
)  # fmt: skip
_LIGHTNING = Kind(
    ("lightning",),
    "train_with_lightning.py",
    ("--devices", 1, "--max_steps", 9, "--every", 2, "--root", "runs", "--top_k", 1,
     "--cluster", "{cluster_id}", "--out", "final.ckpt"),
    ("--resume", "last"),
    "step=6.ckpt", "runs/ck/cluster_0/*.dsx", 2, 8,
)  # fmt: skip
_ACCELERATE = Kind(
    ("accelerate",),
    "train_with_accelerate.py",
    ("--out", "runs", "--steps_between", 8, "--told", "told_{cluster_id}"),
    ("--resume", "runs/step_{step}"),
    "step_24", "runs/step_*/cluster_0", 4, 32, environ={"ACCELERATE_USE_CPU": "true"},
)  # fmt: skip
_ACCELERATE_2X2 = replace(
    _ACCELERATE, ranks=4, killed_in="step_12", last=16, environ={},
    options=("--out", "runs", "--steps_between", 4, "--told", "told_{cluster_id}"),
)  # fmt: skip
_LIGHTNING_2X2 = replace(
    _LIGHTNING, ranks=4, options=(*_LIGHTNING.options, "--devices", 2),
)  # fmt: skip
_ACCELERATE_DEEPSPEED = replace(
    _ACCELERATE_2X2, needs=("deepspeed", "accelerate"), stage=2, before=("-m", "dsx.run"),
    environ={"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"},
)  # fmt: skip
ATTACHED = Kind(
    (), "train_attached.py", ("plain.json",), ("--resume",),
    "step9", "runs/cluster_0/step*", 4, 12, ranks=4, before=(),
)  # fmt: skip
ONE_FOLDER = replace(  # killed between Accelerate's part and DeepSpeed's, of the second save
    _ACCELERATE_DEEPSPEED, ranks=2, killed_in="pytorch_model", resume=("--resume", "runs/last"),
    options=(*_ACCELERATE.options, "--folder", "last"),
    environ={**_ACCELERATE_DEEPSPEED.environ, "SLOW_AGAIN": "1"},
)  # fmt: skip
OF_TWO_CLUSTERS = replace(  # killed where cluster 0 has saved, and cluster 1 has not
    _ACCELERATE, killed_in="cluster_1/accelerate", resume=("--resume", "runs/last"),
    options=(*_ACCELERATE.options, "--folder", "last", "--steps_between", 16),
    environ={**_ACCELERATE.environ, "SLOW_AGAIN": "1"},
)  # fmt: skip
_FOLDERS = "runs/ck/cluster_0/*.ckpt"
KINDS = {
    "trainer": _TRAINER,
    "trainer-zero3-2x2": replace(_TRAINER, ranks=4, stage=3),
    "lightning": _LIGHTNING,
    "lightning-ddp-2x2": _LIGHTNING_2X2,
    "lightning-fsdp2-2x2": replace(
        _LIGHTNING_2X2, kept=_FOLDERS, options=(*_LIGHTNING_2X2.options, "--strategy", "fsdp2")
    ),
    "lightning-fsdp2-file-2x2": replace(
        _LIGHTNING_2X2,
        options=(*_LIGHTNING_2X2.options, "--strategy", "fsdp2", "--one_file"),
    ),
    "lightning-deepspeed-2x2": replace(
        _LIGHTNING_2X2, needs=("deepspeed", "lightning"), kept=_FOLDERS, stage=2,
        options=(*_LIGHTNING_2X2.options, "--strategy", "deepspeed", "--config", "plain.json"),
        environ={"PYTHONPATH": f"{HERE.parents[1]}:{HERE / 'cpu_shim'}"},
    ),
    "accelerate": _ACCELERATE,
    "accelerate-ddp-2x2": _ACCELERATE_2X2,
    "accelerate-fsdp2-2x2": replace(
        _ACCELERATE_2X2, options=(*_ACCELERATE_2X2.options, "--fsdp", 2), around=("on_cpus.py",),
        environ={"ACCELERATE_TORCH_DEVICE": "cpu"},
    ),
    "accelerate-deepspeed-2x2": _ACCELERATE_DEEPSPEED,
}  # fmt: skip


def write_configs(kind: Kind, at: Path, url: str | None, is_beside: bool = True) -> None:
    """Write `ds.json`, as DeepSpeed's users fill it in, and `plain.json` for those of others."""
    checkpoints = {"beside_training": is_beside, "remote": url}
    block = {**BLOCK, "clusters": {"num_clusters": 2}, "checkpoints": checkpoints}
    zero = {"stage": kind.stage, "stage3_gather_16bit_weights_on_model_save": True}
    document = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto", "zero_optimization": zero, "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True, "dsx": block,
    }  # fmt: skip
    (at / "ds.json").write_text(json.dumps(document))
    plain = {**document, "train_micro_batch_size_per_gpu": 2}
    del plain["train_batch_size"], plain["gradient_accumulation_steps"]
    (at / "plain.json").write_text(json.dumps(plain))


def launch(kind: Kind, at: Path, *more: Any, slow: str = "") -> tuple[list[Any], dict[str, str]]:
    command = [
        "python", "-m", "torch.distributed.run", "--nproc-per-node", kind.ranks, "--master-port",
        free_port(), *kind.before,
    ]  # fmt: skip
    if "dsx.run" in kind.before:
        command += ["--dsx-metrics-dir", at / "record"]
    scripts = [SLOWLY, *(HERE / name for name in kind.around), HERE / kind.script]
    return [*command, *scripts, *kind.options, *more], {"SLOW_FROM": slow, **kind.environ}


def train(kind: Kind, at: Path, *more: Any) -> str:
    ((status, output),) = run(launch(kind, at, *more), at=at)
    assert status == 0, output
    return output


def kill_in_a_save(
    kind: Kind,
    at: Path,
    url: str | None,
    *more: Any,
    is_reached: Callable[[str], bool] = lambda log: True,
) -> int:
    """Start, and kill all ranks while an outer state is being written beside training, once
    `is_reached` says so of the log; return the step that is whole at the remote place by then.
    """
    log = at / "killed.log"
    command, environ = launch(kind, at, *more, slow=kind.killed_in)
    launcher = start(command, log, **environ)
    try:
        wait_for(launcher, log, "dsx-save WRITES", 200)
        until = time.monotonic() + 60
        while (url and not common_steps(url)) or not is_reached(log.read_text()):
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
    finally:
        kill_all(launcher)
    return 0 if url is None else max(common_steps(url))


def kill_all(launcher: subprocess.Popen[bytes]) -> None:
    """Kill a launcher and its ranks, with no warning."""
    told = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    )
    parents = {int(pid): int(of) for pid, of in map(str.split, told.stdout.splitlines())}
    ranks = [pid for pid, of in parents.items() if of == launcher.pid]
    for pid in (launcher.pid, *ranks):
        os.kill(pid, signal.SIGKILL)
    launcher.wait(30)


def common_steps(url: str) -> set[int]:
    """Return the steps of what both clusters have at the remote place, whole."""
    remote = Remote(url, "here")
    found = [{tag["step"] for tag in remote.tags(cluster).values()} for cluster in range(2)]
    return found[0] & found[1]


def require_whole(at: Path) -> None:
    """Fail unless all that says it is complete, on the disk and at a place on it, is."""
    folders = [path.parent for path in at.rglob(MANIFEST)]
    assert folders
    assert [find_damage(folder) for folder in folders] == [None] * len(folders)


def models(kind: Kind, at: Path) -> list[Any]:
    """Return what each cluster has at the end."""
    if "trainer" in kind.script:
        from safetensors.torch import load_file

        folders = (at / "runs" / f"cluster_{m}" for m in range(2))
        loaded = [load_file(folder / "model.safetensors") for folder in folders]
        return [{name: tensor.tolist() for name, tensor in one.items()} for one in loaded]
    if "lightning" in kind.script:
        files = [at / "runs" / f"told_{m}" / "0.json" for m in range(2)]
        return [json.loads(file.read_text())["weights"] for file in files]
    found = [json.loads((at / f"told_{m}.0.json").read_text()) for m in range(2)]
    return [[one["own"], one["after"]] for one in found]
