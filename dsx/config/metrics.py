"""The "metrics" section: where the records of a run go, and who is told what.

The line of text below a key is what the generated reference and editors say of it.
"""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from dsx.comm.address import page_address
from dsx.config.files import ConfigError, shown
from dsx.config.notices import NoticeConfig, check_notices
from dsx.core.renamed import warn_renamed

_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)
_Text = Annotated[str, Field(min_length=1)]


class MetricsConfig(BaseModel):
    """Where the records of a run go; without a directory none are written."""

    model_config = _STRICT

    dir: _Text | None = None
    """The directory for the run's records, which `dsx report` and `dsx trace` read; the next free
    name (`dir-2`) where another run has used it; null: none are written."""

    to: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """What else has the numbers of the records, through its own library (the extras `tensorboard`,
    `wandb`, `mlflow`): into the run's folder, where no network is asked unless its own variables
    say so; needs `dir`."""

    tensorboard: bool = False
    """The old spelling of `"to": ["tensorboard"]`, until dsx 0.4."""

    trace: bool = False
    """Whether to write a trace of what every rank does and when, for `dsx trace`; needs `dir`."""

    trace_steps: tuple[int, int] = (1, 1000)
    """The first and the last inner step that the trace holds, from 1; needs `trace`."""

    trace_megabytes: float = Field(default=32.0, ge=1, allow_inf_nan=False)
    """What the trace of one rank may take on its disk, packed, in MB; beyond that its oldest steps
    go; needs `trace`."""

    progress_seconds: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    """How often rank 0 says on its standard error stream where the run is, how fast, what it sends,
    how much of that is hidden and the utilization; cluster 0's where one launcher has started all.
    0: never."""

    prometheus: _Text | None = None
    """Where rank 0 of each cluster serves `/metrics` for Prometheus: HOST:PORT, such as
    "127.0.0.1:9464", at PORT + the cluster's number, on whichever host it is. There is no
    authentication: whoever reaches the address reads it. Needs prometheus-client; null: nowhere."""

    otlp: _Text | None = None
    """The collector that rank 0 of each cluster sends OpenTelemetry spans of rounds, transfers,
    heals and saves to, as OTLP over HTTP, such as "http://127.0.0.1:4318". Needs the extra `otel`;
    null: nowhere."""

    net_test: _Text | None = None
    """The file that `dsx net-test --json` wrote of this run's line, on the host of each cluster's
    first rank: what the line carries is then shown beside what it was measured to. Needs `dir` or
    `prometheus`; null: nobody has measured."""

    notices: tuple[NoticeConfig, ...] = ()
    """Who is told when a cluster is lost, is back or was left out, when training diverges, and when
    it ends: addresses that a message is posted to, and commands."""

    @property
    def keeps_syncs(self) -> bool:
        """Whether anybody wants the records of syncs."""
        return self.dir is not None or self.otlp is not None or self.reads_losses

    @property
    def reads_losses(self) -> bool:
        """Whether anybody wants to know of losses that a script does not tell."""
        return self.prometheus is not None or bool(self.notices)


def with_new_keys(metrics: MetricsConfig, file: str | None) -> MetricsConfig:
    """Return the section with today's keys; warns of an old one, which stands in `file`."""
    if not metrics.tensorboard:
        return metrics
    warn_renamed("dsx.metrics.tensorboard=true", '"to": ["tensorboard"]', file)
    to = (*(name for name in metrics.to if name != "tensorboard"), "tensorboard")
    return metrics.model_copy(update={"tensorboard": False, "to": to})


def check_metrics(metrics: MetricsConfig, num_clusters: int) -> None:
    """Raise ConfigError for keys that would have no effect, and for what cannot be."""
    if metrics.prometheus is not None:
        try:
            page_address(metrics.prometheus, num_clusters)
        except ValueError as error:
            raise ConfigError(f"dsx.{error}") from error
    check_notices(metrics.notices)
    if metrics.otlp is not None:
        _check_collector(metrics.otlp)
    for key in ("to", "tensorboard", "trace"):
        value = getattr(metrics, key)
        if value and metrics.dir is None:
            told = list(value) if key == "to" else value
            raise ConfigError(
                f"dsx.metrics.{key}={told} needs dsx.metrics.dir, a directory to write to; add "
                '"dir": "runs/first", or leave it out'
            )
    if metrics.net_test is not None and metrics.dir is None and metrics.prometheus is None:
        raise ConfigError(
            f"dsx.metrics.net_test={shown(metrics.net_test)} needs dsx.metrics.dir or prometheus, "
            "where its rates are shown; add one of them, or leave it out"
        )
    if len({*metrics.to}) < len(metrics.to):
        raise ConfigError(
            f"dsx.metrics.to={list(metrics.to)} names one twice; write each of them once"
        )
    if metrics.dir is not None and "\0" in metrics.dir:
        raise ConfigError(
            f"dsx.metrics.dir={shown(metrics.dir)} must be a name that a folder can have, without "
            "a character 0; write another one"
        )
    first, last = metrics.trace_steps
    for key, value in (
        ("trace_steps", [first, last]),
        ("trace_megabytes", shown(metrics.trace_megabytes)),
    ):
        if key in metrics.model_fields_set and not metrics.trace:
            raise ConfigError(
                f'dsx.metrics.{key}={value} needs "trace": true; add that, or leave it out'
            )
    if not 1 <= first <= last:
        raise ConfigError(
            f"dsx.metrics.trace_steps=[{first}, {last}] must be the first and the last step to "
            "trace, from 1; try [1, 1000]"
        )


def _check_collector(address: str) -> None:
    """Raise ConfigError for what no spans can be sent to; keys belong into the environment."""
    try:
        parts = urlsplit(address)
        is_plain = not (parts.query or parts.fragment or parts.username or parts.password)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, a port beyond 65535
        is_plain = is_web = False
    if not is_web or not is_plain or not address.isprintable() or " " in address:
        told = shown(address) if "@" not in address and "?" not in address else "(not shown here)"
        raise ConfigError(
            f"dsx.metrics.otlp={told} must be the address of a collector, http:// or https://, "
            "without user, query or path of its own signals; write, for example, "
            '"http://127.0.0.1:4318", and keys into OTEL_EXPORTER_OTLP_HEADERS'
        )
