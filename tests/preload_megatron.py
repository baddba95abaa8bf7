"""What ranks with megatron-core on the CPU import, for their template."""

from __future__ import annotations

from dsx.bench.megatron_on_cpu import install
from tests.templates import preload

preload(
    "pytest",
    "tests.engines.megatron_muon",  # puts what Megatron's Muon is made of on the path
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.optimizer.muon",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.dist_checkpointing",
    "dsx.engines.megatron.engine",
    "dsx.engines.megatron.checkpoint",
    "dsx.engines.attach",
    "dsx.training.handle",
    "tests.engines.engines",
    first=install,
)
