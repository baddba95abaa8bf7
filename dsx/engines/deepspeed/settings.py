"""What of a DeepSpeed engine clusters compare: its JSON, and what it was made into."""

from __future__ import annotations

from typing import Any

from dsx.config.plain import told
from dsx.engines.deepspeed.private import document_of
from dsx.engines.settings import settings_of_modules, settings_of_optimizers, settings_of_schedule

NOT_COMPARED = (
    "dsx",  # compared on its own
    "optimizer", "scheduler",  # compared as they were built
    "train_batch_size",  # a fact: it has to be equal, however it is made up
    "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    # where states lie and how they travel in a site: the layout is compared
    "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "activation_checkpointing", "aio", "compile", "checkpoint", "nebula", "datastates_ckpt",
    "autotuning", "use_node_local_storage", "dataloader_drop_last",
    # what is told
    "steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "flops_profiler",
    "comms_logger", "monitor_config", "tensorboard", "wandb", "comet", "csv_monitor",
)  # fmt: skip


def settings_of_engine(engine: Any) -> dict[str, Any]:
    """Return the settings by the names that `clusters.may_differ` has."""
    document = document_of(engine)
    return {
        "deepspeed": told({k: v for k, v in document.items() if k not in NOT_COMPARED}),
        "optimizer": settings_of_optimizers([engine.basic_optimizer]),
        "lr_scheduler": settings_of_schedule(engine.lr_scheduler),
        "model": settings_of_modules(engine.module.named_modules()),
    }
