"""Masters of Transformer Engine's own FusedAdam, and its own tensors: `--transformer-engine PATH`.

PATH holds its wheel of Python, unpacked; what has been compiled is written in torch
(real_transformer_engine.py), and CUDA is mapped to the CPU. The tests are those of its double.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dsx.engines.masters_apart import refuse_quantized
from tests.distributed import run_distributed
from tests.engines import test_masters_apart as apart
from tests.engines.real_transformer_engine import of_wheel

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def wheel(request: pytest.FixtureRequest) -> str:
    given = request.config.getoption("--transformer-engine")
    if given is None:
        pytest.skip("no wheel of Transformer Engine: give one, unpacked, with --transformer-engine")
    return given


def hold(wheel: str) -> list[str]:
    """Hold the tests of the double to the class itself; return what was refused of it."""
    from dsx.bench.megatron_on_cpu import install

    install()
    adam, quantized = of_wheel(Path(wheel))
    settings = {"lr": 0.01, "weight_decay": 0.1, "master_weights": True}

    def of(**more: Any) -> apart.Make:
        return lambda model: adam(model.parameters(), **{**settings, **more})

    for name, dtype in TYPES.items():
        kind = f"engine itself, {name}"
        apart.KINDS[kind] = of(), dtype
        apart.test_the_outer_step_is_that_of_the_masters(kind)
        apart.test_one_cluster_without_outer_steps_is_the_plain_optimizer(kind)
        apart.test_weights_without_their_masters_are_told(kind)
    refused: dict[str, tuple[apart.Make, torch.dtype]] = {
        "fp32": (of(), torch.float32),
        "masters in fp16": (of(master_weight_dtype=torch.float16), torch.bfloat16),
        "remainders": (of(store_param_remainders=True), torch.bfloat16),
    }
    said = [refusal(apart.TinyNet().to(dtype), make) for make, dtype in refused.values()]
    with pytest.raises(ValueError, match="parameter weight is a QuantizedTensor of Transformer"):
        refuse_quantized("weight", torch.zeros(3).as_subclass(quantized))
    return said


def refusal(model: nn.Module, make: apart.Make) -> str:
    try:
        apart.TorchAdapter(model, make(model), apart.WholeModel(), 1)
    except ValueError as error:
        return str(error)
    return "served"


def test_its_own_adam_is_served_as_its_double(wheel: str) -> None:
    (said,) = run_distributed(hold, 1, wheel, timeout_seconds=200, engine="megatron")
    twice, half, remainders = said
    assert "keeps a second copy of it: leave master_weights out" in twice
    assert "FusedAdam(master_weight_dtype) keeps masters that are not fp32" in half
    assert "FusedAdam(store_param_remainders=True) keeps masters that are not fp32" in remainders
