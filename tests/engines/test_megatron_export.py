"""`dsx export --hf` of a trained Megatron run: transformers computes Megatron's own logits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoint.test_averaged_model import export
from tests.distributed import run_distributed
from tests.engines.megatrons import (
    LENGTH,
    MICRO_BATCHES,
    MICRO_SIZE,
    VOCAB,
    Engine,
    Kind,
    batch,
    build_engine,
    needs_megatron,
    whole_weights,
)
from tests.engines.test_megatron_checkpoint import train
from tests.installed import needs

pytestmark = [needs_megatron, needs("transformers"), pytest.mark.ci]

STEPS, IN_USE = 7, 30  # a fragment is in flight; the vocabulary without two rows that pad it
OF_FOUR = [
    Kind(tensor=2, pipeline=2, is_tied=True, layers_per_stage=3, first_stage=2),
    Kind(family="llama", tensor=2, pipeline=2),
    Kind(family="qwen2", tensor=2, is_sharded=True, overlaps=True),  # and two data-parallel ranks
    Kind(family="qwen3", tensor=2, pipeline=2),
]
WITH_EXPERTS = [
    Kind(family="mixtral", tensor=2, pipeline=2, experts=4, expert_parallel=2, expert_tensor=1),
    Kind(family="qwen2_moe", tensor=2, experts=4, expert_parallel=2, is_sharded=True),
    Kind(family="qwen3_moe", pipeline=2, chunks=2, experts=4, expert_parallel=2),
]
OF_TWO = [
    Kind(family="gpt2 tanh", tensor=2),
    Kind(family="llama tied", pipeline=2, chunks=2, is_tied=True),
]


def tokens(micro: int) -> Tensor:
    return batch(5, 99, micro)[:, :LENGTH] % IN_USE


def logits_step(batches: Iterator[Tensor], model: Any) -> Any:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    positions = torch.arange(LENGTH).expand(MICRO_SIZE, -1)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]  # what is hidden
    output = model(next(batches), positions, mask)
    return output, lambda output, non_loss_data: gather_from_tensor_model_parallel_region(output)


@torch.no_grad()
def logits(engine: Engine) -> list[Any]:
    """What Megatron computes, [MICRO_SIZE, LENGTH, VOCAB] each, on the ranks of the last stage."""
    data = [tokens(micro) for micro in range(MICRO_BATCHES)]
    is_one = len(engine.chunks) == 1
    results = engine.run_schedule(
        forward_step_func=logits_step,
        data_iterator=iter(data) if is_one else [iter(data) for _ in engine.chunks],
        model=engine.chunks[0] if is_one else engine.chunks,
        num_microbatches=MICRO_BATCHES,
        seq_length=LENGTH,
        micro_batch_size=MICRO_SIZE,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return [one.float().numpy().copy() for one in results or []]


def run_kinds(kinds: list[Kind], base: str) -> list[Any]:
    from dsx.engines.megatron.checkpoint import save_outer_state

    found: list[Any] = []
    for index, kind in enumerate(kinds):
        engine = build_engine(kind, attach={"vocab_size": IN_USE})
        train(engine, 1, STEPS)
        assert save_outer_state(engine.handle, STEPS, Path(base) / str(index))
        own = logits(engine)
        with engine.handle.averaged():
            weights = {n: w.numpy() for n, w in whole_weights(engine).items()}
            found.append((logits(engine), own, weights))
        engine.handle.close()
    dist.barrier()
    return found


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [(8, OF_FOUR), (8, WITH_EXPERTS), (4, OF_TWO)],
    ids=["four", "experts", "two"],
)
def test_logits_are_megatron_s(ranks: int, kinds: list[Kind], tmp_path: Path) -> None:
    everyone = run_distributed(
        run_kinds, ranks, kinds, str(tmp_path), timeout_seconds=400, engine="megatron"
    )
    for index, kind in enumerate(kinds):
        expected, own, weights = everyone[-1][index]
        base, out = tmp_path / str(index) / "dsx", tmp_path / f"hf{index}"
        code, said = export(base, "--hf", out, "--max-shard-size", 1e-5)
        assert code == 0, said
        assert f"vocabulary: {IN_USE} of {VOCAB} rows" in said, said
        require_logits(out, kind, expected, own)
        code, said = export(base, "--out", tmp_path / f"own{index}")
        assert code == 0, said
        require_weights(load_file(tmp_path / f"own{index}" / "model.safetensors"), kind, weights)


def require_logits(folder: Path, kind: Kind, expected: list[Any], own: list[Any]) -> None:
    from transformers import AutoModelForCausalLM

    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == kind.family.split()[0]
    assert config["tie_word_embeddings"] == kind.is_tied and config["vocab_size"] == IN_USE
    is_interpolated = kind.family == "llama tied"
    linear = {"rope_type": "linear", "factor": 2.0} if is_interpolated else None
    assert config.get("rope_scaling") == linear
    assert (folder / "model.safetensors.index.json").is_file()
    model: Any
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    for micro, (theirs, cluster) in enumerate(zip(expected, own, strict=True)):
        with torch.no_grad():
            ours = model(tokens(micro)).logits.numpy()
        assert np.abs(ours - theirs[..., :IN_USE]).max() < 1e-5, kind
        assert np.abs(ours - cluster[..., :IN_USE]).max() > 1e-3, kind  # it is the average
        assert ours.std() > 0.1, kind  # and far from what an untrained model says


def require_weights(found: dict[str, Tensor], kind: Kind, weights: dict[str, Any]) -> None:
    """Those under Megatron's names: of one tensor-parallel rank, the gate before the rest."""
    assert {name.removeprefix("decoder.") for name in found} == weights.keys()
    for name, tensor in found.items():
        expected = weights[name.removeprefix("decoder.")]
        if ".linear_fc1." in name and "gpt2" not in kind.family:
            is_expert = ".experts." in name and kind.expert_tensor is not None
            halves = np.split(expected, 2 * (kind.expert_tensor if is_expert else kind.tensor))
            expected = np.concatenate(halves[::2] + halves[1::2])
        assert np.array_equal(tensor.numpy(), expected), (kind, name)
