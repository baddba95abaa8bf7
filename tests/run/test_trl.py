"""TRL's SFT and DPO with LoRA under `python -m dsx.run`: only the adapters travel."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from dsx.telemetry.report import summarize
from tests.distributed import free_port
from tests.installed import needs
from tests.run.launching import run

pytestmark = [needs("deepspeed", "transformers", "accelerate", "trl", "peft"), pytest.mark.ci]

SCRIPT = Path(__file__).with_name("train_with_trl.py")
ROUNDS, STEPS = 2, 8


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_adapters_are_trained_across_clusters(kind: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    block = {
        "preset": "diloco",
        "clusters": {"num_clusters": 2},
        "schedule": {"interval": STEPS // ROUNDS},
        "metrics": {"dir": "record"},
    }
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2},
        "dsx": block,
    }
    (tmp_path / "settings.txt").write_text(json.dumps(config))
    own = ["--nproc-per-node", 2, "--master-port", free_port(), "-m", "dsx.run"]
    command = [sys.executable, "-m", "torch.distributed.run", *own, SCRIPT, kind]
    ((status, output),) = run((command, {}), at=tmp_path)
    assert status == 0, output
    folders = [tmp_path / "runs" / f"cluster_{m}" for m in range(2)]
    first, second = (json.loads((folder / "told.json").read_text()) for folder in folders)
    assert first == second
    assert first["steps"] == STEPS
    assert (first["samples"], first["evaluated"]) == (16, 32)
    saved = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    assert sum(tensor.numel() for tensor in saved[0].values()) == first["trained"]
    assert first["norm"] > 0
    sent = summarize(tmp_path / "record").clusters[0].bytes_sent
    assert 4 * first["trained"] * ROUNDS <= sent < 4 * first["all"]
