"""The section of a "dsx" block that says what the rest of the file is planned for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dsx.config.errors import explain_section
from dsx.config.files import ConfigError, shown
from dsx.config.plain import plain_block

_Text = Annotated[str, Field(min_length=1)]


class PlanConfig(BaseModel):
    """What the run is planned for, for `dsx dry-run`, `dsx memory`, `dsx plan` and `dsx doctor`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: _Text | None = None
    """The file of Megatron's flags that tells the model's sizes, which a DeepSpeed JSON does not,
    by its path from the folder of that JSON: "qwen_107b.flags". A run that trains another number
    of parameters says so at its start; there the file need not be. Megatron's own flags tell its
    model, and a run of it is not compared."""

    ranks_per_cluster: int | None = Field(default=None, ge=1, le=10**6, examples=[80])
    """How many ranks a cluster has. A run whose clusters have another number says so at its
    start."""

    def model_file(self) -> Path | None:
        """Return the model's file where there is one that this host can see, else None."""
        try:
            return path if self.model and (path := Path(self.model)).is_file() else None
        except OSError:  # a name that is too long, or a folder that only another user may enter
            return None


def beside(block: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return a block of the file `source` with the path of the model's file whole, in place."""
    plan = block.get("plan")  # what is no object, or no text, is refused with the block
    if isinstance(plan, dict) and isinstance(
        model := cast("dict[str, Any]", plan).get("model"), str
    ):
        plan["model"] = model and str(source.parent / model)
    return block


def planned_for(document: Mapping[str, Any], source: Path) -> PlanConfig:
    """Return what the "dsx" block of a document that stands in `source` is planned for.

    Nothing is where there is no block. ConfigError for what cannot be; the rest of the block is
    left to `load_config`.
    """
    block = document.get("dsx")
    if not isinstance(block, Mapping) or "plan" not in block:
        return PlanConfig()
    only = {"plan": plain_block(cast("Mapping[str, Any]", block)["plan"], "dsx.plan")}
    values = beside(only, source)["plan"]
    if not isinstance(values, dict):
        raise ConfigError(
            f'dsx.plan must be an object, not {shown(values)}; write "plan": {{"model": ...}}, or '
            "leave it out"
        )
    try:
        return PlanConfig.model_validate(values)
    except ValidationError as error:
        message = explain_section(error, "dsx.plan", PlanConfig, cast("dict[str, Any]", values))
        raise ConfigError(message) from error
