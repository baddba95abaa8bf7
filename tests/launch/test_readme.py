"""The README's examples run as printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_script_of_five_lines(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (command,) = re.findall(r"    (deepspeed --num_gpus 2 train.py)\n", README)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
    }
    done = subprocess.run(
        command.split(), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "runs" / "minimal" / "metrics.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds.count("step") == 4096 // 2 // 16  # every second sample, 16 at a time
    assert kinds.count("sync") == kinds.count("step") // 10
    assert "do all clusters read the same batches" not in done.stderr


def test_the_block_it_prints_is_the_one_in_the_file() -> None:
    (block,) = re.findall(r"```json\n\"dsx\": (.*?)\n```", README, re.DOTALL)
    config = json.loads((ROOT / "configs" / "minimal.json").read_text())
    assert json.loads(block) == config["dsx"]


def test_every_file_it_names_exists() -> None:
    for name in re.findall(r"`?((?:configs|scripts|dsx)/[\w/]+\.(?:json|py|sh))", README):
        assert (ROOT / name).exists(), name
