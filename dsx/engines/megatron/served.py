"""What of Megatron's layouts and optimizers is served, and what is refused, in one table.

docs/megatron.md prints it, and tests hold both halves to what is refused (refusals.py). Needs no
megatron.
"""

from __future__ import annotations

from dsx.engines.megatron.refusals import (
    ABOVE_ONE,
    EXPERT_TENSOR,
    OF_DATA_PARALLEL,
    OF_LOOP,
    OF_MODEL,
    OF_OPTIMIZER,
    OPTIMIZERS,
    OTHER_OPTIMIZER,
    SHARDING,
    flag_of,
)

SERVED = {
    "tensor_model_parallel_size": "slices are parameters of their own",
    "sequence_parallel": "",
    "pipeline_model_parallel_size": "every stage decides as one",
    "num_layers_per_virtual_pipeline_stage": "layers by their number in the whole model",
    "context_parallel_size": "a group's ranks read the same samples and hold the same parameters",
    "num_experts": "one after another on a rank; grouped GEMM, which needs a GPU, was not run",
    "expert_model_parallel_size": "each expert by the ranks that hold it",
    "expert_tensor_parallel_size": f"as for dense layers; {EXPERT_TENSOR}",
    "moe_router_enable_expert_bias": "the bias takes part in outer steps as a vector of its layer",
    "mtp_num_layers": "over several stages with untied heads; the embedding's copy follows it",
    "use_distributed_optimizer": "for dense layers and experts, each over their own ranks",
    "use_precision_aware_optimizer": "fp32 masters or bf16's remainders; run with a stand-in only",
    "overlap_grad_reduce": "",
    "overlap_param_gather": "",
    "use_torch_fsdp2": "rows of every slice; not with stages, expert parallelism or dreamddp",
    "use_megatron_fsdp": "ranges of its buffers, of slices and experts, too; no stages or dreamddp",
    "bf16": "",
    "fp16": "a step that overflows counts",
    "async_save": (
        "the outer state, too, is written beside training; not with `--save-retain-interval`"
    ),
    "rampup_batch_size": "by what each cluster has read itself, at one step in all",
    "step_batch_size_schedule": "as --rampup-batch-size, which it follows in later releases",
}


def table() -> list[tuple[str, str, str]]:
    """Return rows: a flag of Megatron-LM, whether it is served, and what to know or do."""
    rows = [(flag_of(name), "served", note) for name, note in SERVED.items()]
    rows.append(("--optimizer", ", ".join(OPTIMIZERS), f"another is refused: {OTHER_OPTIMIZER}"))
    rows += [(flag_of(name), "1", f"more is refused: {why}") for name, why in ABOVE_ONE.items()]
    rows.append(("--data-parallel-sharding-strategy", ", ".join(SHARDING), "of Megatron-FSDP"))
    refused = {**OF_MODEL, **OF_DATA_PARALLEL, **OF_OPTIMIZER, **OF_LOOP}
    return rows + [(flag_of(name), "refused", why) for name, why in refused.items()]
