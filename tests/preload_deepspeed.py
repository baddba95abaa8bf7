"""What ranks in plain torch and with DeepSpeed import, for their template."""

from __future__ import annotations

import contextlib

from tests.templates import preload


def probe_operators() -> None:
    """Let DeepSpeed compile what tells it which of its operators can be built: once for all."""
    with contextlib.suppress(ModuleNotFoundError):
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__  # noqa: B018


preload(
    "pytest",
    "hypothesis",
    "setuptools",  # torch's and DeepSpeed's builders of extensions
    "distutils.ccompiler",
    "torch.utils.cpp_extension",
    "torch.profiler",
    "torch._inductor.compile_fx",  # DeepSpeed decorates an optimizer with torch.compile
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.checkpoint.ds_to_universal",
    "dsx.engines.deepspeed.engine",
    "dsx.engines.deepspeed.checkpoint",
    "dsx.engines.deepspeed.data",
    "dsx.engines.attach",
    "dsx.training.handle",
    "tests.engines.engines",
    last=probe_operators,
)
