"""The "dsx" block of a DeepSpeed JSON, strictly read into a `Method` and the cluster settings.

A preset fills every axis; any key below it overrides one. The resolved block (preset and
overrides merged) is validated as a whole against the dataclasses of the axes themselves, so JSON
keys equal field names and there is one schema. An unknown key, or one the chosen type would
ignore, is an error that names the nearest valid one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from dsx.config.axes import read_choice
from dsx.config.checkpoints import CheckpointsConfig, check_checkpoints
from dsx.config.divergence import DivergenceConfig, check_divergence
from dsx.config.errors import explain_section, shorten_key, with_advice, word_of
from dsx.config.files import ConfigError, read_json, shown
from dsx.config.link import LinkConfig, check_link
from dsx.config.metrics import MetricsConfig, check_metrics, with_new_keys
from dsx.config.plain import plain_block
from dsx.config.planned import PlanConfig, beside
from dsx.config.renames import with_new_names
from dsx.config.sections import (
    COMMON,
    Block,
    ClustersConfig,
    CodingConfig,
    GuardConfig,
    StateConfig,
    check_address,
    check_clusters,
    check_coding,
    check_state,
)
from dsx.core.checks import nearest
from dsx.method.choices import AXES, PRESETS, preset_method
from dsx.method.fragments import at_most
from dsx.method.ladder import Ladder
from dsx.method.method import Method

_Model = TypeVar("_Model", bound=BaseModel)


@dataclass(frozen=True)
class DsxConfig:
    """The "dsx" block, resolved: `method` is what runs, `axes` the same as plain JSON values.

    `given` is the whole document that it was read from, for a run's own record of it.
    """

    preset: str
    clusters: ClustersConfig
    metrics: MetricsConfig
    state: StateConfig
    coding: CodingConfig
    link: LinkConfig
    checkpoints: CheckpointsConfig
    divergence: DivergenceConfig
    guard: GuardConfig
    plan: PlanConfig
    method: Method
    axes: dict[str, Any]
    given: Mapping[str, Any]

    def common(self) -> dict[str, Any]:
        """Return what of it has to be the same in all clusters."""
        clusters = self.clusters.model_dump(mode="json", include=set(COMMON))
        sections = {
            "link": self.link.common(),
            "checkpoints": self.checkpoints.common(),
            "divergence": self.divergence.model_dump(),
            "guard": self.guard.model_dump(),
        }
        return {**self.axes, **sections, "clusters": clusters}

    def block(self) -> dict[str, Any]:
        """Return the "dsx" block with every default in it: reading it again gives the same."""
        metrics = self.metrics.model_dump(
            mode="json", exclude=None if self.metrics.trace else {"trace_steps", "trace_megabytes"}
        )
        return {
            "preset": self.preset,
            "clusters": self.clusters.model_dump(mode="json"),
            "metrics": metrics,
            "state": self.state.model_dump(),
            "coding": self.coding.model_dump(),
            "link": self.link.model_dump(),
            "checkpoints": self.checkpoints.model_dump(),
            "divergence": {
                key: value
                for key, value in self.divergence.model_dump().items()
                if value != type(self.divergence).model_fields[key].default
            },
            "guard": self.guard.model_dump(),
            "plan": self.plan.model_dump(exclude_none=True),
            **self.axes,
        }


def preset(name: str, num_clusters: int = 2, **overrides: Mapping[str, Any]) -> Method:
    """Return a named method with axes overridden: `preset("diloco", schedule={"interval": 50})`.

    `overrides` are the axes of a "dsx" block, each with the keys that differ. Only eager's outer
    rate depends on `num_clusters`. Raises ConfigError for a name, key or value that is not known,
    and for choices that cannot go together.
    """
    return resolve_method(name, overrides, num_clusters)[0]


def load_config(source: str | Path | Mapping[str, Any]) -> DsxConfig:
    """Read the "dsx" block of a DeepSpeed config (a path, or the parsed JSON).

    The result holds the sections, the `method` and, as plain values, its `axes`. Raises
    ConfigError for anything that is missing, unknown, ignored or impossible.
    """
    document = read_json(source)
    if "dsx" not in document:
        raise ConfigError('the DeepSpeed config has no "dsx" block; add {"dsx": {"preset": ...}}')
    if not isinstance(document["dsx"], Mapping):
        raise ConfigError(
            f'"dsx" must be an object, not {shown(document["dsx"])}; write '
            '{"dsx": {"preset": ..., "clusters": {"num_clusters": 2}}}'
        )
    file = None if isinstance(source, Mapping) else str(source)
    plain = plain_block(document["dsx"])
    block = _section("dsx", Block, plain if file is None else beside(plain, Path(file)))
    overrides = {axis: getattr(block, axis) for axis in AXES}
    method, axes = resolve_method(block.preset, overrides, block.clusters.num_clusters, file)
    method = dataclasses.replace(
        method,
        on_mismatch=block.clusters.on_mismatch,
        anchor_check_interval=block.clusters.anchor_check_interval,
        max_idle_rounds=block.clusters.max_idle_rounds,
        max_norm_ratio=block.clusters.max_norm_ratio,
        guard=block.guard.action,
    )
    try:
        Ladder(method, None).require_rungs()
    except ValueError as error:
        raise ConfigError(f"dsx.{error}") from None
    check_metrics(block.metrics, block.clusters.num_clusters)
    check_divergence(block.divergence)
    check_state(block.state)
    check_coding(block.coding, method.compression, axes["compression"]["type"])
    check_checkpoints(block.checkpoints)
    check_address(block.clusters)
    check_link(block.link, block.clusters.num_clusters, block.clusters.rendezvous)
    return DsxConfig(
        preset=block.preset,
        clusters=block.clusters,
        metrics=with_new_keys(block.metrics, file),
        state=block.state,
        coding=block.coding,
        link=block.link,
        checkpoints=block.checkpoints,
        divergence=block.divergence,
        guard=block.guard,
        plan=block.plan,
        method=method,
        axes=axes,
        given=document,
    )


def resolve_method(
    name: Any, overrides: Mapping[str, Any], num_clusters: int = 2, file: str | None = None
) -> tuple[Method, dict[str, Any]]:
    """Return a preset with overrides applied, as a validated method and as plain values.

    `file` is where the overrides stand, if in one.
    """
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"dsx.preset={shown(name)} is not known{nearest(word_of(name), PRESETS)}")
    for axis in overrides:
        if axis not in AXES:
            raise ConfigError(f"dsx.{shorten_key(axis)} is not a known key{nearest(axis, AXES)}")
    _require_count(num_clusters)
    try:
        base = preset_method(name, num_clusters)
    except ValueError as error:
        raise ConfigError(f"dsx.{error}") from error
    axes: dict[str, Any] = {}
    chosen: dict[str, Any] = {}
    usual: dict[str, Any] = {}
    for axis in AXES:
        override = overrides.get(axis, {})
        if not isinstance(override, Mapping):
            raise ConfigError(
                f"dsx.{axis} must be an object, not {shown(override)}; write "
                f'"{axis}": {{...}}, or leave it out'
            )
        plain = plain_block(cast(Mapping[str, Any], override), f"dsx.{axis}")
        given = with_new_names(axis, plain, file)
        usual[axis] = _usual(axis, getattr(base, axis), given)
        axes[axis], chosen[axis] = read_choice(axis, {**usual[axis], **given}, usual[axis])
    schedule, fragments = chosen["schedule"], chosen["fragments"]
    if schedule.takes_turns and at_most(fragments, schedule.interval) != fragments:
        chosen["fragments"] = at_most(fragments, schedule.interval)
        axes["fragments"]["most"] = schedule.interval
    method = dataclasses.replace(base, **chosen)
    try:
        method.validate()
    except ValueError as error:
        raise ConfigError(f"dsx.{with_advice(str(error), usual, overrides)}") from error
    return method, axes


def with_launch_arguments(
    config: DsxConfig, given: Mapping[str, Any], security: str | None = None
) -> DsxConfig:
    """Return the config with what is given per launcher, where not None: keys of `clusters`, and
    `link.security`.
    """  # fmt: skip
    values = config.clusters.model_dump() | {k: v for k, v in given.items() if v is not None}
    clusters = _section("dsx.clusters", ClustersConfig, values)
    check_clusters(clusters)
    link = config.link
    if security is not None:
        link = _section("dsx.link", LinkConfig, link.model_dump() | {"security": security})
    check_link(link, clusters.num_clusters, clusters.rendezvous)
    return dataclasses.replace(config, clusters=clusters, link=link)


def _require_count(num_clusters: Any) -> None:
    """Raise ConfigError, in the words of a block, for what cannot be a number of clusters."""
    _section("dsx.clusters", ClustersConfig, plain_block({"num_clusters": num_clusters}))


def _usual(axis: str, default: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of an axis if nothing of it is given but, perhaps, the type.

    They are the preset's, and those of another type its own defaults. `given` gets a type, in
    place, if it has none.
    """
    selector, choices = AXES[axis]
    name = choices.of(default)
    chosen = given.setdefault(selector, name)
    if chosen == name:
        return {selector: name, **dataclasses.asdict(default)}
    kind = choices.get(chosen) if isinstance(chosen, str) else None
    return _defaults(kind) if kind else {}


def _defaults(kind: type[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found


def _section(path: str, model: type[_Model], values: Mapping[str, Any]) -> _Model:
    try:
        return model.model_validate_json(json.dumps(dict(values)))
    except ValidationError as error:
        message = explain_section(error, path, model, values)
        raise ConfigError(message + _missing_advice(message)) from error


def _missing_advice(message: str) -> str:
    return f"; choose one of {', '.join(PRESETS)}" if message == "dsx.preset is missing" else ""
