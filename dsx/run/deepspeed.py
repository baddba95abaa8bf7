"""`deepspeed.initialize`, whoever calls it: an engine that has an optimizer trains across clusters.

One without, such as a reference or a reward model, stays DeepSpeed's own inside its cluster.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import dsx
from dsx.comm.world import current_world
from dsx.config.files import read_json
from dsx.engines.deepspeed.engine import adopt_world
from dsx.run.session import Session

_NOT_HANDED_ON = ("config", "config_params", "distributed_port", "dist_init_required")


def replace_initialize(session: Session, deepspeed: ModuleType) -> None:
    """Let `deepspeed.initialize` attach what it makes."""
    module: Any = deepspeed
    original = module.initialize
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(*args, **kwargs).arguments)
        config = _config_across_clusters(session, given)
        if config is None:
            return original(*args, **kwargs)
        result = dsx.initialize(**_without_world(given), config=config)
        session.handles.append(result[0].dsx)
        return result

    module.initialize = initialize
    vars(initialize)["plain"] = original  # what dsx.initialize calls
    if current_world() is not None:
        adopt_world()


def _config_across_clusters(session: Session, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config with this run's block; None for an engine that stays in its cluster."""
    source = _source(given)
    document = _document(source)
    if document is None:
        return None
    if not _has_optimizer(given, document):
        session.seen.append("a DeepSpeed engine without optimizer")
        return None
    file = "" if isinstance(source, Mapping) else str(source)
    if session.show(document, file or "a config of the script", file) is None:
        what = file or "which the script gives as a dict"
        session.seen.append(f'a DeepSpeed engine whose config, {what}, has no "dsx" block')
        return None
    session.divides_data |= given.get("training_data") is None
    return session.config_with_block(document)


def _without_world(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments without a config, and without what is of a world: there is one."""
    left = {name: value for name, value in given.items() if name not in _NOT_HANDED_ON}
    if getattr(left.get("args"), "deepspeed_config", None) is not None:
        left["args"] = copy.copy(left["args"])  # DeepSpeed takes one config only
        left["args"].deepspeed_config = None
    return left


def _source(given: Mapping[str, Any]) -> Any:
    for name in ("config", "config_params"):
        if given.get(name) is not None:
            return given[name]
    return getattr(given.get("args"), "deepspeed_config", None)


def _document(source: Any) -> Mapping[str, Any] | None:
    """Return a config as it is written; None for what DeepSpeed itself has to make out."""
    if isinstance(source, Mapping):
        return cast("Mapping[str, Any]", source)
    if isinstance(source, str | Path) and os.path.exists(source):
        return read_json(source)
    return None


def _has_optimizer(given: Mapping[str, Any], document: Mapping[str, Any]) -> bool:
    section = document.get("optimizer")
    return given.get("optimizer") is not None or (
        isinstance(section, Mapping) and bool(cast("Mapping[str, Any]", section).get("type"))
    )
