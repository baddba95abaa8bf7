"""From a Hugging Face folder into DeepSpeed, trained by two clusters, and out to a folder again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dsx
from dsx.comm.world import current_world
from tests.checkpoint.test_averaged_model import export
from tests.distributed import run_distributed
from tests.engines.engines import ds_config, quiet, weights
from tests.engines.hugging_face import logits, make_model, make_tokenizer, tokens
from tests.installed import needs

pytestmark = needs("deepspeed", "transformers")

STEPS = 5  # of H = 4, a delay of 2: a transfer is in flight at the end
ROWS = [("gpt2", 1), ("llama", 3)]
OTHERS = [("llama", 0), ("qwen2", 2), ("gpt2", 3)]


def start_from(folder: str, stage: int) -> Any:
    """Return an engine with the weights of a folder, as docs/hugging-face-models.md does it."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    config = ds_config(stage, "fp32", "streaming_diloco")
    config["train_micro_batch_size_per_gpu"] = 2
    config["dsx"]["fragments"] = {"num_fragments": 2}
    if current_world() is None:
        dsx.init_distributed(config)
    kept = HfDeepSpeedConfig(config) if stage == 3 else None
    model = AutoModelForCausalLM.from_pretrained(folder)
    if stage == 3:
        assert all(hasattr(p, "ds_id") for p in model.parameters())  # cut as it was loaded
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = dsx.initialize(model=model, optimizer=optimizer, config=config)[0]
    del kept
    return engine


def train(folder: str, stage: int, base: str) -> dict[str, Any]:
    quiet()
    engine = start_from(folder, stage)
    found: dict[str, Any] = {"start": {n: w.numpy() for n, w in weights(engine).items()}}
    for step in range(1, STEPS + 1):
        for micro in range(2):
            batch = tokens(engine.dsx.cluster_id, step, 2 * engine.global_rank + micro)
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
    engine.save_checkpoint(base, tag="a")
    with engine.dsx.averaged():
        found["logits"] = logits(engine.module).numpy()
    engine.dsx.close()
    engine.destroy()
    return found


def train_all(base: str, rows: list[tuple[str, int]]) -> list[dict[str, Any]]:
    return [
        train(f"{base}/{row}/start", stage, f"{base}/{row}/run")
        for row, (_, stage) in enumerate(rows)
    ]


@pytest.mark.parametrize(
    "rows",
    [pytest.param(ROWS, marks=pytest.mark.ci), pytest.param(OTHERS, marks=pytest.mark.slow)],
    ids=["one of each", "others"],
)
def test_in_and_out(rows: list[tuple[str, int]], tmp_path: Path) -> None:
    models = [make_model(name, seed) for seed, (name, _) in enumerate(rows)]
    for row, model in enumerate(models):
        model.save_pretrained(tmp_path / f"{row}/start")
        make_tokenizer().save_pretrained(tmp_path / f"{row}/start")
    everyone = run_distributed(train_all, 4, str(tmp_path), rows, timeout_seconds=280)
    for row, model in enumerate(models):
        check(model, [found[row] for found in everyone], tmp_path / str(row))


def check(model: Any, everyone: list[dict[str, Any]], base: Path) -> None:
    from transformers import AutoModelForCausalLM

    for found in everyone:
        for weight, expected in model.named_parameters():
            assert (found["start"][weight] == expected.detach().numpy()).all(), weight
        assert (found["logits"] == everyone[0]["logits"]).all()
    code, said = export(base / "run", "--hf", base / "out", "--config", base / "start")
    assert code == 0 and "left out: " in said, said
    loaded, told = AutoModelForCausalLM.from_pretrained(base / "out", output_loading_info=True)
    assert not any(told.values()), told
    assert (logits(loaded).numpy() == everyone[0]["logits"]).all()
    assert not torch.equal(logits(loaded), logits(model))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (base / "out" / name).read_bytes() == (base / "start" / name).read_bytes()
