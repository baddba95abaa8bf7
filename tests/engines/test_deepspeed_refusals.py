"""What the DeepSpeed adapter does not serve is refused by name, with what to use instead."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

import dsx
from dsx.comm.world import current_world
from dsx.engines.deepspeed.features import (
    leaves_out_a_micro_batch,
    reads_before_it_has_come,
    refuse_mpu,
    refuse_sharded_pipeline,
    refuse_unsupported,
    steps_with_autograd,
)
from dsx.engines.deepspeed.masters import require_fp32
from dsx.engines.deepspeed.refusals import refuse_document
from dsx.engines.inner_names import numbers_of
from dsx.engines.masters import Piece
from tests.distributed import run_distributed
from tests.engines.engines import (
    Kind,
    build_engine,
    ds_config,
    engine_arguments,
    quiet,
    train_step,
)
from tests.installed import needs

pytestmark = needs("deepspeed")

ON_HOST = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "/nowhere"}
ZENFLOW = {"offload_optimizer": ON_HOST, "zenflow": {"topk_ratio": 0.1}}
SETTINGS: dict[str, dict[str, Any]] = {
    "zero_optimization.offload_optimizer.device='nvme'": {
        "zero_optimization": {"stage": 3, "offload_optimizer": NVME}
    },
    "zero_optimization.offload_param.device='nvme'": {
        "zero_optimization": {"stage": 3, "offload_param": NVME}
    },
    "zero_optimization.offload_optimizer.ratio=0.5": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {**ON_HOST, "ratio": 0.5}}
    },
    "zero_optimization.offload_optimizer.super_offload=true": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {**ON_HOST, "super_offload": True}}
    },
    "zero_optimization.zenflow": {"zero_optimization": {"stage": 2, **ZENFLOW}},
    "zero_optimization.zero_quantized_weights=true": {
        "zero_optimization": {"stage": 3, "zero_quantized_weights": True}
    },
    "zero_optimization.zero_quantized_gradients=true": {
        "zero_optimization": {"stage": 3, "zero_quantized_gradients": True}
    },
    "torch_autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "checkpoint.use_node_local_storage=true": {"checkpoint": {"use_node_local_storage": True}},
    "compile.deepcompile=true": {"compile": {"deepcompile": True}},
}
SINCE = {  # the first release whose JSON may have it; one before it takes no such key
    "zero_optimization.offload_optimizer.super_offload=true": [0, 18, 0],
    "zero_optimization.zenflow": [0, 17, 5],
}


@pytest.mark.parametrize(
    ("version", "backend", "ranks", "is_early"),
    [
        ("0.19.7", "gloo", 2, True), ("0.18.9+cpu", "gloo", 2, True), ("0.19.8", "gloo", 2, False),
        ("0.19.10", "gloo", 2, False), ("0.20.0", "gloo", 2, False), ("0.19.6", "nccl", 2, False),
        ("0.19.6", "gloo", 1, False),
    ],
)  # fmt: skip
def test_zero_3_that_reads_what_has_not_come_is_known(
    version: str, backend: str, ranks: int, is_early: bool
) -> None:
    assert reads_before_it_has_come(version, backend, ranks) == is_early


@pytest.mark.parametrize(
    ("version", "backend", "is_followed"),
    [
        ("0.18.6", "gloo", False), ("0.18.7", "gloo", True), ("0.18.9+cpu", "gloo", True),
        ("0.19.0", "gloo", False), ("0.18.9", "nccl", False),
    ],
)  # fmt: skip
def test_flat_weights_that_autograd_follows_are_known(
    version: str, backend: str, is_followed: bool
) -> None:
    assert steps_with_autograd(version, backend) == is_followed


@pytest.mark.parametrize(
    ("version", "is_left_out"),
    [("0.17.6", False), ("0.18.2", False), ("0.18.3", True), ("0.18.9", True), ("0.19.0", False)],
)
def test_a_last_micro_batch_that_is_not_averaged_is_known(version: str, is_left_out: bool) -> None:
    assert leaves_out_a_micro_batch(version) == is_left_out


ATTRIBUTES: dict[str, dict[str, Any]] = {
    "mixture of experts with sequence parallelism": {
        "has_moe_layers": True, "sequence_parallel_size": 2,
    },
    "an mpu with 2 slices of each layer": {"mp_world_size": 2},
    "sequence_parallel_size=2 by a mesh": {
        "sequence_parallel_size": 2, "seq_data_parallel_group": "of one rank",
    },
}  # fmt: skip


def message_of(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return "served"


def told_of(engine: Any, document: dict[str, Any]) -> str:
    """What dsx says of an engine with this JSON; of one that DeepSpeed cannot read, what it says.

    The engine has the JSON from then on, if DeepSpeed can read it.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        engine._config = DeepSpeedConfig(document)
    except ValidationError as error:
        wrong = [(each["type"], *each["loc"]) for each in error.errors()]
        return f"{error.title} refuses {wrong}"
    return message_of(refuse_unsupported, engine)


def unfreeze() -> str:
    """Step once with a parameter that was frozen, in the optimizer, and no longer is."""
    arguments = engine_arguments(Kind(0))
    arguments["model"].layers[1].weight.requires_grad_(False)
    engine = dsx.initialize(**arguments)[0]
    engine.module.layers[1].weight.requires_grad_(True)
    try:
        train_step(engine, 1)
    except RuntimeError as error:
        return str(error)
    finally:
        engine.dsx.close()
    return "served"


LAYERWISE: dict[str, dict[str, Any]] = {"after": {"when": "after"}, "backwards": {"backwards": 3}}


def layerwise(**schedule: Any) -> dict[str, Any]:
    clusters = {"num_clusters": 2, "deadline_seconds": 30}
    return {"preset": "dreamddp", "clusters": clusters, "schedule": schedule}


def try_everything() -> dict[str, str]:
    quiet()
    messages = {
        name: message_of(build_engine, Kind(1), dsx=layerwise(**schedule))
        for name, schedule in LAYERWISE.items()
    }
    arguments = engine_arguments(Kind(0))  # with ZeRO, DeepSpeed itself refuses
    arguments["optimizer"].add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    messages["not the model's"] = message_of(dsx.initialize, **arguments)
    arguments = engine_arguments(Kind(0))
    arguments["optimizer"] = torch.optim.SGD(list(arguments["model"].parameters())[1:], lr=0.2)
    messages["in no optimizer"] = message_of(dsx.initialize, **arguments)
    messages["unfrozen"] = unfreeze()
    cluster = current_world().cluster_id
    other = Kind(1, precision="bf16" if cluster else "fp32")
    messages["dtypes"] = message_of(build_engine, other)
    engine = build_engine(Kind(1))
    served = engine._config
    for name, setting in SETTINGS.items():
        messages[name] = told_of(engine, {**ds_config(1, "fp32", "diloco"), **setting})
    engine._config = served
    alone, _ = dist.new_subgroups(1)
    for name, attributes in ATTRIBUTES.items():
        before = {attribute: getattr(engine, attribute) for attribute in attributes}
        for attribute, value in attributes.items():
            setattr(engine, attribute, alone if value == "of one rank" else value)
        messages[name] = message_of(refuse_unsupported, engine)
        for attribute, value in before.items():
            setattr(engine, attribute, value)
    messages["plain"] = message_of(refuse_unsupported, engine)
    return messages


@pytest.fixture(scope="module")
def messages() -> dict[str, str]:
    return run_distributed(try_everything, 4, timeout_seconds=240)[0]


@pytest.mark.parametrize("name", [*SETTINGS, *ATTRIBUTES])
def test_a_setting_is_refused_by_name(name: str, messages: dict[str, str]) -> None:
    """Or, of a release that has no such key, DeepSpeed refuses just that: no engine can have it."""
    import deepspeed

    if numbers_of(deepspeed.__version__) < SINCE.get(name, [0]):
        key = name.partition("=")[0].split(".")[1:]
        assert messages[name] == f"DeepSpeedZeroConfig refuses {[('extra_forbidden', *key)]}"
        return
    assert messages[name].startswith(f"dsx does not serve {name} of DeepSpeed: ")
    assert re.search("use |leave it out", messages[name])
    assert messages["plain"] == "served"


def test_a_step_inside_the_backward_is_refused_with_what_works_instead(
    messages: dict[str, str],
) -> None:
    message = messages["after"]
    assert message.startswith("dsx.schedule.when='after' takes a layer's optimizer step inside")
    assert "DeepSpeed has not reduced its gradients yet; use schedule.when='before'" in message
    assert messages["backwards"] == (
        "dsx.schedule.backwards=3: this engine takes 2 backward passes per inner step "
        "(gradient_accumulation_steps); leave it out, or give 2"
    )


def test_trained_parameters_outside_the_model_are_refused(messages: dict[str, str]) -> None:
    assert "trains 10 parameters, 9 of them in the model" in messages["not the model's"]


def test_what_no_optimizer_holds_is_refused_at_the_start_or_once_it_is_unfrozen(
    messages: dict[str, str],
) -> None:
    assert messages["in no optimizer"].startswith("no optimizer holds parameter gain, ")
    assert messages["unfrozen"].startswith("parameter layers.1.weight was frozen and in no opt")


def test_models_of_other_types_are_refused(messages: dict[str, str]) -> None:
    said = "clusters do not match at dtypes.gain: cluster 0 has float32, cluster 1 has bfloat16"
    assert messages["dtypes"].startswith(said)


def test_masters_that_are_not_fp32_are_refused() -> None:
    piece = Piece(torch.zeros(2, dtype=torch.bfloat16), (2,))
    with pytest.raises(ValueError, match="of w is torch.bfloat16, not fp32; unset bf16_master"):
        require_fp32({"w": piece})


def test_a_setting_is_refused_before_anything_is_built() -> None:
    """And before DeepSpeed reads it: a release that has no such key says nothing of it."""
    for name, setting in SETTINGS.items():
        config = {**ds_config(1, "fp32", "diloco"), **setting}
        with pytest.raises(
            ValueError, match=f"^dsx does not serve {re.escape(name)} of DeepSpeed: "
        ):
            dsx.initialize(model=torch.nn.Linear(2, 2), config=config)
    assert current_world() is None  # no cluster was waited for


def test_a_sequence_parallel_size_goes_with_an_mpu() -> None:
    refuse_document({"sequence_parallel_size": 2}, has_mpu=True)
    with pytest.raises(ValueError, match="sequence_parallel_size=2 without an mpu of DeepSpeed: "):
        refuse_document({"sequence_parallel_size": 2}, has_mpu=False)


class OfSequence:
    """What of DeepSpeed's mpu of sequence parallelism is looked for."""

    def get_sequence_data_parallel_group(self) -> None:
        """Never called."""


def test_an_mpu_of_other_kinds_is_refused_and_training_data_that_it_cannot_deal() -> None:
    refuse_mpu(None, has_training_data=True)
    refuse_mpu(OfSequence(), has_training_data=False)
    with pytest.raises(ValueError, match=r"initialize\(mpu=object\) is not served: of an mpu dsx"):
        refuse_mpu(object(), has_training_data=False)
    with pytest.raises(ValueError, match="training_data with mpu=OfSequence: DeepSpeed asks an mp"):
        refuse_mpu(OfSequence(), has_training_data=True)


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"stage": 2, "offload_optimizer": ON_HOST, "zenflow": {}}, "zero_optimization.zenflow"),
        ({"stage": 3, "mics_shard_size": "2"}, "zero_optimization.mics_shard_size='2'"),
    ],
)
def test_an_empty_section_and_a_number_in_quotes_are_refused_as_deepspeed_takes_them(
    zero: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        refuse_document({"zero_optimization": zero}, False)


def test_autotp_with_a_pipeline_is_refused_before_anything_is_built() -> None:
    from deepspeed.pipe import PipelineModule

    model = PipelineModule.__new__(PipelineModule)
    refuse_sharded_pipeline(model, {"tensor_parallel": {"autotp_size": 1}})
    with pytest.raises(ValueError, match=r"autotp_size=2 with a PipelineModule is not served"):
        refuse_sharded_pipeline(model, {"tensor_parallel": {"autotp_size": 2}})
    refuse_sharded_pipeline(torch.nn.Linear(1, 1), {"tensor_parallel": {"autotp_size": 2}})
