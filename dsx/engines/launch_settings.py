"""With what a process joins its world: the configuration, and a launcher's arguments."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsx.comm.joining import RendezvousConfig
from dsx.config.files import require_folder
from dsx.config.link import require_said
from dsx.config.schema import load_config, with_launch_arguments

_OF_CLUSTERS = ("cluster_id", "rendezvous", "store", "interface")
logger = logging.getLogger(__name__)


def read_launch(
    config: str | Path | Mapping[str, Any], args: argparse.Namespace | None
) -> RendezvousConfig:
    """Return how to meet the other clusters; ConfigError for what cannot be.

    Warns where what clusters tell each other is open to whoever reaches the line.
    """
    given = {key: getattr(args, f"dsx_{key}", None) for key in _OF_CLUSTERS}
    security = getattr(args, "dsx_link_security", None)
    settings = with_launch_arguments(load_config(config), given, security)
    warning = require_said(settings.link, settings.clusters.rendezvous, os.environ)
    if warning is not None and os.environ.get("RANK", "0") == "0":
        logger.warning(warning)
    if settings.metrics.dir is not None:
        require_folder("dsx.metrics.dir", settings.metrics.dir)
    names = {field.name for field in dataclasses.fields(RendezvousConfig)}
    of_clusters = settings.clusters.model_dump(include=names)
    return RendezvousConfig(**of_clusters, link=settings.link.settings)
