"""Every file in configs/paper is made small as it says, keeps its method, and trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsx.config.files import ConfigError
from dsx.config.flags import block_of_flags
from dsx.config.schema import load_config
from dsx.data.command import build
from dsx.examples.scaled_down import read_sizes, scale_down_flags, scale_down_json
from dsx.plan.model_files import read_words
from tests.distributed import free_port
from tests.installed import needs
from tests.paper_configs.settings import FILES, FOLDER, IMAGES

ROOT = FOLDER.parents[1]
LANGUAGE = [file for file in FILES if file != IMAGES]
# one of each method and engine; -m slow starts all others
STARTED = ("dreamddp/gpt2.json", "dreamddp/llama_175m.flags", "dilocox/qwen_107b_pp80.flags")


def identify(file: Path) -> str:
    return str(file.relative_to(FOLDER))


def scaled(file: Path) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return the axes of the file and of what it becomes, and the changes that are told."""
    if file.suffix == ".json":
        whole, small = load_config(file), scale_down_json(file)
    else:
        whole, small = load_config(block_of_flags(read_words(file))), scale_down_flags(file)[0]
    return whole.axes, load_config(small.document).axes, small.changes


@pytest.mark.parametrize("file", LANGUAGE, ids=identify)
def test_the_method_stays_and_what_changes_is_told(file: Path) -> None:
    whole, small, changes = scaled(file)
    for axis, values in whole.items():
        for key, value in values.items():
            if small[axis][key] != value:
                is_told = any(
                    change.startswith(("H ", "tau ") if key in ("interval", "steps") else axis)
                    for change in changes
                )
                assert is_told, (axis, key, value, small[axis][key])
    assert {axis: values.get("type", values.get("by")) for axis, values in whole.items()} == {
        axis: values.get("type", values.get("by")) for axis, values in small.items()
    }
    assert any(change.startswith("layers ") for change in changes)


def test_ratios_and_layers_of_a_stage_are_kept() -> None:
    cut, megatron = scale_down_flags(FOLDER / "dilocox/qwen_107b_pp80.flags")
    assert (megatron["num_layers"], megatron["pipeline_model_parallel_size"]) == (2, 2)
    assert cut.document["dsx"]["control"]["rank"] == 2048 * 64 // 8192
    _, both = scale_down_flags(FOLDER / "dilocox/qwen_107b_tp8_pp10.flags")
    assert (both["num_layers"], both["tensor_model_parallel_size"]) == (8, 2)
    assert both["pipeline_model_parallel_size"] == 2  # of eight layers, and here of four
    small = scale_down_json(FOLDER / "cocodc/cocodc.json")
    assert small.sizes["steps"] == 6 * 8 and small.document["dsx"]["delay"]["steps"] == 1
    assert small.document["scheduler"]["params"]["warmup_num_steps"] == round(48 * 1000 / 18000)
    assert "train_batch_size" not in small.document


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layer": 4}, "pretrain_gpt.layer is not known; allowed: layers, hidden"),
        ({"layers": 0}, "pretrain_gpt.layers=0 must be a whole number of at least 1"),
        ({"layers": True}, "pretrain_gpt.layers=True must be a whole number"),
        ({"qk_norm": 1}, "pretrain_gpt.qk_norm=1 must be true or false"),
        ({"z_loss": -0.1}, "pretrain_gpt.z_loss=-0.1 must be a number of at least 0"),
        ([4], r'"pretrain_gpt" must be an object, not \[4\]'),
    ],
)
def test_sizes_that_are_none_are_refused_by_name(sizes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_sizes({"pretrain_gpt": sizes}, "a.json")


def test_flags_without_a_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.flags").write_text("--num-layers 4 --dsx-preset diloco --dsx-num-clusters 2")
    with pytest.raises(ConfigError, match="lacks --hidden-size, .*, --train-iters"):
        scale_down_flags(tmp_path / "a.flags")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    build([Path(json.__file__).parents[1] / "asyncio"], path)
    return path


def start(file: Path, data: Path, run: Path) -> None:
    """Train a file's small form by the one flag, and look at what came of it."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
    }
    stages = "pipeline" in file.read_text()
    ranks = 8 if "--tensor" in file.read_text() else 4 if stages else 2
    if file.suffix == ".json":
        command = ["deepspeed", "--num_gpus", str(ranks), "--master_port", str(free_port())]
        command += ["scripts/pretrain_gpt_deepspeed.py", "--data", str(data)]
    else:
        command = ["torchrun", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
        command += ["scripts/pretrain_gpt_megatron.py", "--data-path", str(data)]
    command += ["--scaled-down", str(file), "--run-dir", str(run)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "scaled down: " in done.stdout and "layers " in done.stdout
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "step"]
    assert len(losses) >= 48 and sum(losses[-8:]) / 8 < 0.99 * sum(losses[:8]) / 8
    assert any(record["kind"] == "sync" for record in records)
    whole, _, _ = scaled(file)
    assert records[0]["axes"]["outer_optimizer"] == whole["outer_optimizer"]


@needs("deepspeed", "megatron")
@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", STARTED)
def test_it_trains(name: str, data: Path, tmp_path: Path) -> None:
    start(FOLDER / name, data, tmp_path / "run")


@needs("deepspeed", "megatron")
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", [f for f in LANGUAGE if identify(f) not in STARTED], ids=identify)
def test_all_others_train(file: Path, data: Path, tmp_path: Path) -> None:
    start(file, data, tmp_path / "run")
