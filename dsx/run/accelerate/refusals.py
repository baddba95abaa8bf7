"""What of Accelerate is not served: refused by name, before it trains."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from dsx.config.files import ConfigError
from dsx.config.schema import DsxConfig
from dsx.run.replace import around
from dsx.run.session import RouteNotTaken


def refuse_settings(accelerator: Any, settings: DsxConfig) -> None:
    """Raise ConfigError for an Accelerator, or keys of the "dsx" block, that are not served."""
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind in ("MEGATRON_LM", "XLA"):
        raise ConfigError(
            f"Accelerate with {kind} is not served by dsx.run, which serves DeepSpeed, DDP and "
            "FSDP2; Megatron-LM's own scripts are (docs/megatron.md)"
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if kind == "FSDP" and getattr(plugin, "fsdp_version", 1) != 2:
        raise ConfigError(
            "fsdp_version=1 is not served by dsx.run: set fsdp_version: 2 in accelerate's config "
            "(FSDP_VERSION=2, FullyShardedDataParallelPlugin(fsdp_version=2))"
        )
    if accelerator.project_configuration.save_on_each_node:
        raise ConfigError(
            "ProjectConfiguration(save_on_each_node=True): the ranks of a cluster share a "
            "directory; leave it out"
        )
    if settings.checkpoints.keep is not None:
        raise ConfigError(
            f"dsx.checkpoints.keep={settings.checkpoints.keep} would delete what "
            "accelerator.save_state() has saved: leave it out and set "
            "ProjectConfiguration(total_limit)"
        )
    if settings.divergence.max_rollbacks:
        raise ConfigError(
            f"dsx.divergence.max_rollbacks={settings.divergence.max_rollbacks} is not served with "
            "Accelerate, whose script counts steps and samples itself: leave it out; a run that "
            "has diverged ends, and the next start loads a checkpoint of before"
        )


def refuse_launchers(launchers: ModuleType) -> None:
    """Let launchers that fork from inside a script refuse to: the clusters would not be known."""
    for name in ("notebook_launcher", "debug_launcher"):
        _refuse(
            launchers, name,
            f"accelerate.{name}() starts ranks itself, and those of dsx.run are there already: "
            "call the training function, or start the script by accelerate launch or torchrun",
        )  # fmt: skip


def refuse_local_sgd(local_sgd: ModuleType) -> None:
    """Let LocalSGD refuse: its ranks differ, and what clusters send is one model."""
    _refuse(
        local_sgd.LocalSGD, "__init__",  # type: ignore[attr-defined]
        "accelerate.LocalSGD lets the ranks of a cluster train models that differ, which dsx.run "
        "does not serve: leave it out; the clusters average every schedule.interval steps",
    )  # fmt: skip


def refuse_search_of_batch_size(memory: ModuleType) -> None:
    """Let find_executable_batch_size refuse: a cluster that runs out of memory would go on alone.

    The Trainer asks for it with auto_find_batch_size alone, which is refused before.
    """
    _refuse(
        memory, "find_executable_batch_size",
        "accelerate.utils.find_executable_batch_size() prepares again with a smaller batch where "
        "memory runs out, in one cluster without the others, which would wait for it: leave it "
        "out, and set the batch size that fits in every cluster",
    )  # fmt: skip


def _refuse(owner: Any, name: str, why: str) -> None:
    def refuse(original: Any, *args: Any, **kwargs: Any) -> Any:
        raise RouteNotTaken(why)

    around(owner, name, refuse)
