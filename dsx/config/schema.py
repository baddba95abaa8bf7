"""The "dsx" block of a DeepSpeed JSON, strictly read into a `Method` and the cluster settings.

A preset fills every axis; any key below it overrides one. The resolved block (preset and
overrides merged) is validated as a whole against the dataclasses of the axes themselves, so JSON
keys equal field names and there is one schema. An unknown key, or one the chosen type would
ignore, is an error that names the nearest valid one.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from dsx.comm.multistream import MAX_STREAMS
from dsx.compress.base import Dense
from dsx.compress.low_rank import LowRank
from dsx.compress.quantized import Quantized
from dsx.compress.top_k import TopK
from dsx.config.files import ConfigError, read_json
from dsx.method.control.adaptive_rank import AdaptiveRank
from dsx.method.control.base import Fixed
from dsx.method.delay.average import Average
from dsx.method.delay.base import Replace
from dsx.method.delay.delay_compensation import DelayCompensation
from dsx.method.delay.eager import Eager
from dsx.method.delay.one_step import OneStepDelay
from dsx.method.delay.streaming import Blend
from dsx.method.fragments import ByLayer, BySize, WholeModel
from dsx.method.method import Method
from dsx.method.outer_optimizer import SGD, Adam, Momentum, Nesterov, NoOuterStep
from dsx.method.presets import PRESETS
from dsx.method.schedule.adaptive_transmission import AdaptiveTransmission
from dsx.method.schedule.layerwise import Layerwise
from dsx.method.schedule.periodic import Periodic, Streaming
from dsx.method.staleness import GapPenalty, NoPenalty

# Each axis: the key that selects a choice, and the choices. A new one is one line here.
AXES: dict[str, tuple[str, dict[str, Any]]] = {
    "fragments": ("by", {"model": WholeModel, "layer": ByLayer, "size": BySize}),
    "schedule": (
        "type",
        {
            "periodic": Periodic,
            "streaming": Streaming,
            "adaptive": AdaptiveTransmission,
            "layerwise": Layerwise,
        },
    ),
    "delay": (
        "type",
        {
            "replace": Replace,
            "blend": Blend,
            "compensation": DelayCompensation,
            "one_step": OneStepDelay,
            "eager": Eager,
            "average": Average,
        },
    ),
    "outer_optimizer": (
        "type",
        {"sgd": SGD, "momentum": Momentum, "nesterov": Nesterov, "adam": Adam, "none": NoOuterStep},
    ),
    "staleness": ("type", {"none": NoPenalty, "gap": GapPenalty}),
    "compression": (
        "type",
        {"dense": Dense, "quantized": Quantized, "low_rank": LowRank, "top_k": TopK},
    ),
    "control": ("type", {"fixed": Fixed, "adaptive_rank": AdaptiveRank}),
}


class ClustersConfig(BaseModel):
    """Who takes part and how they meet."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    num_clusters: int = Field(ge=1)
    cluster_id: int | None = Field(default=None, ge=0)
    rendezvous: str = "env://"
    store: Literal["cluster_0", "standalone"] = "cluster_0"
    join_deadline_seconds: float = Field(default=300.0, gt=0)
    deadline_seconds: float = Field(default=600.0, gt=0)
    on_mismatch: Literal["resend", "stop"] = "resend"
    interface: str | None = None


class MetricsConfig(BaseModel):
    """Where the records of a run go; without a directory none are written.

    `trace_steps`: the first and the last step that a trace holds.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    dir: str | None = None
    tensorboard: bool = False
    trace: bool = False
    trace_steps: tuple[int, int] = (1, 1000)


class StateConfig(BaseModel):
    """Where anchor, momentum and the like live: with the masters, or in pinned host memory."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    device: Literal["masters", "host"] = "masters"


class LinkConfig(BaseModel):
    """How a transfer uses the link: over how many TCP connections of each fragment and peer."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    streams: int = Field(default=1, ge=1, le=MAX_STREAMS)


@dataclass(frozen=True)
class DsxConfig:
    """The "dsx" block, resolved: `method` is what runs, `axes` the same as plain JSON values.

    `given` is the whole document that it was read from, for a run's own record of it.
    """

    preset: str
    clusters: ClustersConfig
    metrics: MetricsConfig
    state: StateConfig
    link: LinkConfig
    method: Method
    axes: dict[str, Any]
    given: Mapping[str, Any]

    def block(self) -> dict[str, Any]:
        """Return the "dsx" block with every default in it: reading it again gives the same."""
        metrics = self.metrics.model_dump(
            mode="json", exclude=None if self.metrics.trace else {"trace_steps"}
        )
        return {
            "preset": self.preset,
            "clusters": self.clusters.model_dump(),
            "metrics": metrics,
            "state": self.state.model_dump(),
            "link": self.link.model_dump(),
            **self.axes,
        }


def preset(name: str, num_clusters: int = 2, **overrides: Mapping[str, Any]) -> Method:
    """Return a named method with axes overridden: `preset("diloco", schedule={"interval": 50})`.

    Only eager's outer rate depends on `num_clusters`.
    """
    return resolve_method(name, overrides, num_clusters)[0]


def load_config(source: str | Path | Mapping[str, Any]) -> DsxConfig:
    """Read the "dsx" block of a DeepSpeed config (a path, or the parsed JSON).

    Raises ConfigError for anything that is missing, unknown, ignored or impossible.
    """
    document = read_json(source)
    if "dsx" not in document:
        raise ConfigError('the DeepSpeed config has no "dsx" block; add {"dsx": {"preset": ...}}')
    block = document["dsx"]
    if not isinstance(block, Mapping):
        raise ConfigError(f'"dsx" must be an object, not {block!r}')
    block = cast(Mapping[str, Any], block)
    _require_known("dsx", block, ["preset", "clusters", "metrics", "state", "link", *AXES])
    if "preset" not in block:
        raise ConfigError(f"dsx.preset is missing; choose one of {', '.join(PRESETS)}")
    if "clusters" not in block:
        raise ConfigError('dsx.clusters is missing; add {"clusters": {"num_clusters": 2}}')
    overrides = {axis: block[axis] for axis in AXES if axis in block}
    clusters = _section("clusters", ClustersConfig, block["clusters"])
    method, axes = resolve_method(block["preset"], overrides, clusters.num_clusters)
    metrics = _section("metrics", MetricsConfig, block.get("metrics", {}))
    _check_metrics(metrics)
    return DsxConfig(
        preset=block["preset"],
        clusters=clusters,
        metrics=metrics,
        state=_section("state", StateConfig, block.get("state", {})),
        link=_section("link", LinkConfig, block.get("link", {})),
        method=dataclasses.replace(method, on_mismatch=clusters.on_mismatch),
        axes=axes,
        given=document,
    )


def resolve_method(
    name: Any, overrides: Mapping[str, Any], num_clusters: int = 2
) -> tuple[Method, dict[str, Any]]:
    """Return a preset with overrides applied, as a validated method and as plain values."""
    if name not in PRESETS:
        raise ConfigError(f"dsx.preset={name!r} is not known{_hint(str(name), PRESETS)}")
    _require_known("dsx", overrides, AXES)
    if num_clusters < 1:
        raise ConfigError(f"num_clusters={num_clusters} must be at least 1")
    base = PRESETS[name](num_clusters)
    axes: dict[str, Any] = {}
    chosen: dict[str, Any] = {}
    for axis in AXES:
        axes[axis], chosen[axis] = _resolve_axis(axis, getattr(base, axis), overrides.get(axis, {}))
    method = dataclasses.replace(base, **chosen)
    try:
        method.validate()
    except ValueError as error:
        raise ConfigError(f"dsx.{error}") from error
    return method, axes


def with_launch_arguments(config: DsxConfig, given: Mapping[str, Any]) -> DsxConfig:
    """Return the config with the keys of `clusters` that differ per launcher, where not None."""
    values = config.clusters.model_dump() | {k: v for k, v in given.items() if v is not None}
    clusters = _section("clusters", ClustersConfig, values)
    _check_clusters(clusters)
    return dataclasses.replace(config, clusters=clusters)


def _resolve_axis(axis: str, default: Any, override: Any) -> tuple[dict[str, Any], Any]:
    """Merge an override into a preset's choice; another type starts from its own defaults."""
    selector, choices = AXES[axis]
    path = f"dsx.{axis}"
    if not isinstance(override, Mapping):
        raise ConfigError(f"{path} must be an object, not {override!r}")
    given = dict(cast(Mapping[str, Any], override))
    default_name = next(name for name, kind in choices.items() if type(default) is kind)
    name = given.pop(selector, default_name)
    if name not in choices:
        raise ConfigError(f"{path}.{selector}={name!r} is not known{_hint(str(name), choices)}")
    kind = choices[name]
    fields = [selector, *(f.name for f in dataclasses.fields(kind))]
    _require_known(path, given, fields, context=f" for {selector}={name!r}")
    values = {**dataclasses.asdict(default), **given} if name == default_name else given
    missing = [
        f.name
        for f in dataclasses.fields(kind)
        if f.name not in values and f.default is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{path} with {selector}={name!r} needs {', '.join(missing)}")
    try:
        choice = TypeAdapter(kind).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise ConfigError(_explain(path, error)) from error
    return {selector: name, **dataclasses.asdict(choice)}, choice


def _section(name: str, model: type[BaseModel], values: Any) -> Any:
    path = f"dsx.{name}"
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} must be an object, not {values!r}")
    _require_known(path, cast(Mapping[str, Any], values), model.model_fields)
    try:
        return model.model_validate_json(json.dumps(dict(cast(Mapping[str, Any], values))))
    except ValidationError as error:
        raise ConfigError(_explain(path, error)) from error


def _check_metrics(metrics: MetricsConfig) -> None:
    for key in ("tensorboard", "trace"):
        if getattr(metrics, key) and metrics.dir is None:
            raise ConfigError(f"dsx.metrics.{key} needs dsx.metrics.dir, a directory to write to")
    first, last = metrics.trace_steps
    if "trace_steps" in metrics.model_fields_set and not metrics.trace:
        raise ConfigError(f'dsx.metrics.trace_steps=[{first}, {last}] needs "trace": true')
    if not 1 <= first <= last:
        raise ConfigError(
            f"dsx.metrics.trace_steps=[{first}, {last}] must be the first and the last step to "
            "trace, from 1; try [1, 1000]"
        )


def _check_clusters(clusters: ClustersConfig) -> None:
    if clusters.rendezvous == "env://" and clusters.store == "standalone":
        raise ConfigError(
            "dsx.clusters.store='standalone' needs an address: set rendezvous (or "
            "--dsx-rendezvous) to the tcp://host:port where `dsx rendezvous` listens"
        )
    if clusters.cluster_id is not None and clusters.cluster_id >= clusters.num_clusters:
        raise ConfigError(
            f"dsx.clusters.cluster_id={clusters.cluster_id} must be below num_clusters="
            f"{clusters.num_clusters}"
        )


def _require_known(
    path: str, given: Mapping[str, Any], known: Iterable[str], context: str = ""
) -> None:
    allowed = list(known)
    for key in given:
        if key not in allowed:
            raise ConfigError(f"{path}.{key} is not a known key{context}{_hint(key, allowed)}")


def _hint(word: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    nearest = f"; did you mean {near[0]!r}?" if near else ";"
    return f"{nearest} Allowed: {', '.join(names)}"


def _explain(path: str, error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join([path, *(str(part) for part in first["loc"])])
    if first["type"] == "missing":
        return f"{where} is missing"
    return f"{where}={first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
