"""The section of a "dsx" block about training that diverges."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from dsx.config.files import ConfigError


class DivergenceConfig(BaseModel):
    """When training counts as diverged, and whether it goes back to the last good checkpoint."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    max_loss: float | None = Field(default=None, allow_inf_nan=False)
    """Training has diverged where a cluster's losses, as `log_step(loss=...)` tells them or
    Megatron-LM's loop reports them, are above this, or not finite, `patience` times in a row. null:
    no bound."""

    max_loss_factor: float | None = Field(default=None, gt=1, allow_inf_nan=False)
    """The same, with a bound of this many times the median of the cluster's last 100 losses."""

    patience: int = Field(default=3, ge=1)
    """How many losses in a row have to be beyond a bound."""

    max_rollbacks: int = Field(default=0, ge=0)
    """How often a run goes back to the last good checkpoint, in all clusters at one step, where it
    has diverged by a bound or a NonFiniteError. Then, and with 0 at once, it ends. For DeepSpeed,
    and plain PyTorch with `handle.on_rollback`; not where a cluster has pipeline stages."""

    data: Literal["go_on", "as_saved"] = "go_on"
    """Where the data goes on after going back: behind the stretch that training diverged in, or
    where the checkpoint has it. It is what a script tracks, and the training_data of dsx."""


def check_divergence(divergence: DivergenceConfig) -> None:
    """Raise ConfigError for keys that would have no effect."""
    has_bound = divergence.max_loss is not None or divergence.max_loss_factor is not None
    if "patience" in divergence.model_fields_set and not has_bound:
        raise ConfigError(
            f"dsx.divergence.patience={divergence.patience} has no effect without a bound: set "
            "max_loss or max_loss_factor, or leave it out"
        )
    if "data" in divergence.model_fields_set and not divergence.max_rollbacks:
        raise ConfigError(
            f"dsx.divergence.data={divergence.data!r} has no effect where a run does not go back: "
            "set max_rollbacks to 1 or more, or leave it out"
        )
