"""Weights & Biases: a run of its own for each cluster and start, in a group named after the run.

Everything else is said as the library has it, by WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and
others. Where nobody has logged in it is offline: files in the run's folder, which `wandb sync`
sends. A run that the script itself has begun stays the script's.
"""

from __future__ import annotations

import logging
import netrc
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from dsx.telemetry.exporters.sink import Kind, Start, not_installed

NAME = "wandb"
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_STEP = "inner_step"  # the axis of all charts: a step of the library's own cannot be taken again
logger = logging.getLogger(__name__)


class _Run:
    def __init__(self, wandb: Any, start: Start) -> None:
        folder = start.path(NAME)
        folder.mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("WANDB_MODE")
        if mode is None and not _has_key():
            mode = "offline"
            logger.info(
                "nobody is logged in to Weights & Biases here, so its files stay in %s: wandb sync "
                "sends them (or wandb login before a run)", folder,
            )  # fmt: skip
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "dsx"),
            dir=str(folder),
            group=start.run,
            name=f"{start.run} cluster {start.cluster}",
            mode=mode,
            reinit="create_new",
            settings=wandb.Settings(console="off", quiet=True, x_disable_stats=True),
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def describe(self, record: Mapping[str, Any]) -> None:
        """Take what runs as the run's configuration."""
        self._run.config.update({k: v for k, v in record.items() if k != "parameters"})

    def write(self, numbers: Mapping[str, float], step: int, time: float) -> None:
        """Log the numbers of one record at once."""
        self._run.log({_STEP: step, "_timestamp": time, **numbers})

    def close(self) -> None:
        """Finish the run; online it waits until all is sent."""
        self._run.finish()


def _has_key() -> bool:
    """Whether somebody has logged in: by a variable, or by `wandb login`, which keeps it so."""
    if any(os.environ.get(name) for name in _KEYS):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def find() -> Kind:
    """Return the kind; ModuleNotFoundError without the library."""
    try:
        import wandb
    except ImportError as error:
        raise ModuleNotFoundError(not_installed(NAME, "wandb", "wandb")) from error
    return Kind(NAME, lambda start: _Run(wandb, start))
