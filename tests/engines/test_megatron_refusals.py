"""What the Megatron adapter does not serve is refused by name, with what to use instead."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.distributed import run_distributed
from tests.engines.megatrons import Kind, build_engine, build_inner, dsx_config, needs_megatron

pytestmark = needs_megatron

# attribute: value; where it is set
MODEL = {
    "hybrid_context_parallel": True,
}
DATA_PARALLEL = {
    "use_custom_fsdp": True,
    "reuse_grad_buf_for_mxfp8_param_ag": True,
    "fp8_param_gather": True,
    "num_distributed_optimizer_instances": 2,
}
OPTIMIZER = {
    "overlap_param_gather_with_optimizer_step": True,
    "optimizer_cpu_offload": True,
    "optimizer_cuda_graph": True,
    "reuse_grad_buf_for_mxfp8_param_ag": True,
    "optimizer": "dist_muon",
    "muon_scalar_optimizer": "lion",
    "use_layer_wise_distributed_optimizer": True,
}
TYPES = ("LayerWiseDistributedOptimizer", "HybridDeviceOptimizer")


def message_of(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "served"


def try_settings(engine: Any) -> dict[str, str]:
    from dsx.engines.megatron.features import refuse_unsupported

    leaf = engine.optimizer.chained_optimizers[0]
    chunk = engine.chunks[0]
    places = {"model": (chunk.config, MODEL), "ddp": (chunk.ddp_config, DATA_PARALLEL)}
    places["optimizer"] = (leaf.config, OPTIMIZER)
    messages: dict[str, str] = {}
    for place, (config, settings) in places.items():
        for attribute, value in settings.items():
            before = getattr(config, attribute, None)
            setattr(config, attribute, value)
            message = message_of(refuse_unsupported, engine.chunks, engine.optimizer)
            messages[f"{place} {attribute}"] = message
            setattr(config, attribute, before)
    messages["plain"] = message_of(refuse_unsupported, engine.chunks, engine.optimizer)
    chunk.ddp_config.use_megatron_fsdp = True  # as a chunk of it would say, with no_shard
    messages["no_shard"] = message_of(refuse_unsupported, engine.chunks, engine.optimizer)
    chunk.ddp_config.use_megatron_fsdp = False
    wrapped = type("FullyShardedDataParallel", (), {"config": chunk.config})()
    messages["chunk"] = message_of(refuse_unsupported, [wrapped], engine.optimizer)
    return messages


def try_types(engine: Any) -> dict[str, str]:
    from dsx.engines.megatron.features import refuse_unsupported
    from dsx.engines.megatron.masters import locate

    chain = engine.optimizer
    leaf = chain.chained_optimizers[0]
    messages: dict[str, str] = {}
    for name in TYPES:
        inner = type(name, (), {"param_groups": []})()
        whole = SimpleNamespace(optimizer=inner, config=leaf.config)
        messages[name] = message_of(refuse_unsupported, engine.chunks, whole)
        messages[f"{name} itself"] = message_of(refuse_unsupported, engine.chunks, inner)
    messages["unknown"] = message_of(locate, type("NewOptimizer", (), {})())
    sharded = build_inner(Kind(is_sharded=True), 0)
    chain.chained_optimizers += sharded.optimizer.chained_optimizers
    messages["mixed"] = message_of(locate, chain)
    return messages


def try_attaching() -> dict[str, str]:
    """Refusals that clusters must agree on, so that none is left waiting."""
    from megatron.core import num_microbatches_calculator as calculator

    import dsx
    from dsx.comm.world import current_world

    messages: dict[str, str] = {}
    engine = build_engine(Kind())
    config = dsx_config()

    def attach(chunks: Any, optimizer: Any, **more: Any) -> str:
        return message_of(dsx.attach_megatron, chunks, optimizer, config=config, **more)

    messages["twice"] = attach(engine.chunks, engine.optimizer)
    engine.handle.close()
    wider = build_inner(Kind(), 0)
    extra = wider.chunks[0].module.extra = torch.nn.Parameter(torch.zeros(3))
    messages["in no optimizer"] = attach(wider.chunks, wider.optimizer)
    extra.requires_grad_(False)
    messages["frozen"] = attach(wider.chunks, wider.optimizer)
    extra.requires_grad_(True)
    messages["unfrozen"] = message_of(wider.optimizer.step)
    wider.optimizer.dsx.close()
    other = build_inner(Kind(), 0)
    other.optimizer.chained_optimizers[0].optimizer.add_param_group(
        {"params": [torch.nn.Parameter(torch.zeros(3))]}
    )
    messages["not the model's"] = attach(other.chunks, other.optimizer)
    renamed = build_inner(Kind(), 0)
    renamed.chunks[0].module.vision = renamed.chunks[0].module.decoder
    del renamed.chunks[0].module.decoder
    messages["unknown place"] = attach(renamed.chunks, renamed.optimizer)
    renamed.optimizer.dsx.close()
    two = build_inner(Kind(), 0)
    vars(two.chunks[0].module).update(add_encoder=True, add_decoder=True)
    messages["two parts"] = attach(two.chunks, two.optimizer)
    layerwise = build_inner(Kind(), 0)
    averaged = {"preset": "dreamddp", "clusters": config["dsx"]["clusters"]}
    after = {"dsx": {**averaged, "schedule": {"when": "after"}}}
    messages["layerwise"] = message_of(
        dsx.attach_megatron, layerwise.chunks, layerwise.optimizer, config=after
    )
    calculator.init_num_microbatches_calculator(0, None, 12, 2, 1)
    other = {"dsx": {**averaged, "schedule": {"backwards": 2}}}
    messages["backwards"] = message_of(
        dsx.attach_megatron, layerwise.chunks, layerwise.optimizer, config=other
    )
    calculator.unset_num_microbatches_calculator()
    layerwise.chunks[0].config.cuda_graph_impl = "local"
    messages["graphs"] = message_of(
        dsx.attach_megatron, layerwise.chunks, layerwise.optimizer, config={"dsx": averaged}
    )
    cluster = current_world().cluster_id  # type: ignore[union-attr]
    sharded = build_inner(Kind(is_sharded=cluster == 1), 0)
    messages["differs"] = attach(sharded.chunks, sharded.optimizer)
    batches = build_inner(Kind(), 0)
    facts = {"global_batch_size": 8 + cluster}
    messages["facts"] = attach(batches.chunks, batches.optimizer, facts=facts)
    clipped = build_inner(Kind(), 0)
    clipped.optimizer.chained_optimizers[0].config.clip_grad = 1.0 + cluster
    messages["clipping"] = attach(clipped.chunks, clipped.optimizer)
    normed = build_inner(Kind(), 0)
    normed.chunks[0].config.layernorm_epsilon = 1e-5 / (1 + cluster)
    messages["epsilon"] = attach(normed.chunks, normed.optimizer)
    return messages


def try_everything() -> dict[str, dict[str, str]]:
    engine = build_inner(Kind(), 0)
    return {
        "settings": try_settings(engine),
        "types": try_types(engine),
        "attaching": try_attaching(),
    }


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, dict[str, str]]]:
    return run_distributed(try_everything, 2, timeout_seconds=200, engine="megatron")


@pytest.mark.parametrize(
    ("place", "attribute"),
    [("model", a) for a in MODEL] + [("ddp", a) for a in DATA_PARALLEL]
    + [("optimizer", a) for a in OPTIMIZER],
)  # fmt: skip
def test_a_setting_is_refused_by_name(place: str, attribute: str, outcomes: Any) -> None:
    messages = outcomes[0]["settings"]
    assert messages["plain"] == "served"
    assert re.match(
        rf"dsx does not serve {attribute}=.* of Megatron: ", messages[f"{place} {attribute}"]
    )


@pytest.mark.parametrize("name", TYPES)
def test_a_type_is_refused_by_name(name: str, outcomes: Any) -> None:
    messages = outcomes[0]["types"]
    for key in (name, f"{name} itself"):
        assert messages[key].startswith(f"dsx does not serve {name} of Megatron: ")


def test_an_unknown_shape_is_refused(outcomes: Any) -> None:
    messages = outcomes[0]["types"]
    assert "does not know where" in messages["unknown"] and "NewOptimizer" in messages["unknown"]
    assert "with DistributedOptimizer in part" in messages["mixed"]
    wrapped = outcomes[0]["settings"]["chunk"]
    assert "a model chunk of type FullyShardedDataParallel" in wrapped
    whole = outcomes[0]["settings"]["no_shard"]
    assert "data_parallel_sharding_strategy='no_shard' of Megatron: with Megatron-FSDP" in whole
    attaching = outcomes[0]["attaching"]
    assert attaching["unknown place"] == "served"  # on one stage
    assert "parameters, " in attaching["not the model's"]
    assert attaching["two parts"] == "served"  # on one stage; test_megatron_names.py on several


def test_attaching_is_refused_in_all_clusters_alike(outcomes: Any) -> None:
    for rank in outcomes:
        messages = rank["attaching"]
        assert messages["in no optimizer"].startswith("no optimizer holds parameter module.extra, ")
        assert messages["frozen"] == "served"
        assert messages["unfrozen"].startswith("parameter module.extra was frozen and in no opt")
        assert messages["twice"].endswith("attach it once")
        assert messages["layerwise"].startswith("dsx.schedule.when='after' takes a layer's opti")
        assert "this engine takes 6 backward passes per inner step" in messages["backwards"]
        assert "does not serve cuda_graph_impl='local' of Megatron with" in messages["graphs"]
        assert messages["differs"].startswith("clusters do not match at megatron.masters[0]")
        assert messages["facts"].startswith("clusters do not match at global_batch_size")
        assert "optimizer.clip_grad: cluster 0 has 1.0, cluster 1 has 2.0;" in messages["clipping"]
        assert "transformer.layernorm_epsilon: cluster 0 has 1e-05," in messages["epsilon"]
