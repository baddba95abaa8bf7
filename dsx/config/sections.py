"""The sections of a "dsx" block that are no part of the method, as pydantic models.

The line of text below a key is what the generated reference and editors say of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dsx.comm.address import parse_address
from dsx.compress.base import Compressor
from dsx.config.checkpoints import CheckpointsConfig
from dsx.config.divergence import DivergenceConfig
from dsx.config.files import ConfigError, shown
from dsx.config.link import LinkConfig
from dsx.config.metrics import MetricsConfig
from dsx.config.planned import PlanConfig
from dsx.method.alarms import GuardAction

OF_DATA = ("data", "data_shards", "validation")
_DECIDING = (  # what is done, by all
    "on_mismatch",
    "anchor_check_interval",
    "max_idle_rounds",
    "max_norm_ratio",
)
COMMON = ("num_clusters", *_DECIDING, "may_differ", *OF_DATA)  # of "clusters"
MOST_CLUSTERS = 10_000
_LONGEST = 3e7  # about a year, which torch's and gloo's timeouts can hold
_SIGNALS = {"SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"}
_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)
_Text = Annotated[str, Field(min_length=1)]
_Seconds = Annotated[float, Field(ge=0.001, le=_LONGEST)]


class ClustersConfig(BaseModel):
    """Who takes part, and how they meet."""

    model_config = _STRICT

    num_clusters: int = Field(ge=1, le=MOST_CLUSTERS, examples=[2])
    """The number of clusters (C) that train together; all of them have to come."""

    cluster_id: int | None = Field(default=None, ge=0)
    """The number of this cluster, from 0. It differs where every cluster has a launcher of its own,
    and is better given as `--dsx-cluster-id` then; null: one launcher starts all clusters."""

    rendezvous: _Text = "env://"
    """Where the clusters meet: "tcp://HOST:PORT" of cluster 0 or of `dsx rendezvous`, or "env://",
    where one launcher starts all ranks of all clusters: its own meeting point is used."""

    store: Literal["cluster_0", "standalone"] = "cluster_0"
    """Who listens at the rendezvous: the first rank of cluster 0, or a `dsx rendezvous` that runs
    by itself."""

    join_deadline_seconds: _Seconds = 300.0
    """How long a cluster waits at the start for all others, in seconds, before it gives up."""

    deadline_seconds: _Seconds = 600.0
    """How long any exchange of messages may take, in seconds; more than the largest fragment needs
    on a shared line, in fp32 for `averaged()`. A peer that does not answer by then is lost."""

    on_mismatch: Literal["resend", "stop"] = "stop"
    """What to do when clusters hold different models and no more than half of them agree, as with
    two: stop with ParityError, or take the outer state of the first one and go on. Where more than
    half agree, the others take theirs."""

    anchor_check_interval: int = Field(default=8, ge=0)
    """After how many rounds of a fragment clusters compare their outer parameters, by a hash that
    the training thread makes at the launch; means are compared in every round. 0: never."""

    max_idle_rounds: int | None = Field(default=None, ge=0)
    """After how many rounds in a row in which a cluster took no inner step all clusters stop, with
    NonFiniteError. A round lasts from a launch of a fragment to its next one; an optimizer skips
    steps whose gradients are not finite. null: 3, or as many as 50 steps take; 0: never."""

    max_norm_ratio: float | None = Field(default=1000.0, gt=1)
    """The largest norm of what a cluster sends of a fragment, in the median one of all, of two the
    smaller one. What is larger is left out by all, like what is not finite, and its cluster goes on
    from the outer parameters. Of samples, which are compared in any case; null: any will do."""

    data: Literal["auto", "split", "own"] = "auto"
    """Whose training data is: "split" divides what all clusters share between them, "own" lets each
    read all of its own; "auto" looks which it is, by the content. For `dsx.initialize` with
    `training_data`, for Megatron-LM's loop, and for scripts under `python -m dsx.run`; a loader of
    your own divides its data itself."""

    data_shards: int = Field(default=16, ge=0, le=4096)
    """Into how many shards each cluster's part of the data is cut in an epoch. While a cluster is
    gone from a run over links, the others read what it has not, a shard at a time, and it goes on
    behind those when it is back. 0: nobody reads its part. For `training_data` of `dsx.initialize`
    and a tracked `dsx.data.ClusterBatches`."""

    validation: Literal["own", "average", "both"] = "own"
    """Whose loss Megatron-LM's validation prints: that of this cluster's own model, of the average
    of all clusters, or both, on the same batches, which are kept in host memory for that. An
    average costs what an export does; elsewhere it is `averaged()`."""

    may_differ: tuple[_Text, ...] = ()
    """Settings of the inner training that are meant to differ between clusters, by the names that
    the message of a difference has, such as "optimizer.lr" or "deepspeed.gradient_clipping"; a name
    stands for all that is below it. Everything else that is compared has to be equal."""

    preemption_signals: tuple[_Text, ...] = ("SIGTERM",)
    """The signals on which this cluster saves at its next step boundary and ends, such as
    ["SIGTERM", "SIGUSR1"]. The others go on without it, over links with a majority left; else they
    are told, and do the same. []: none."""

    grace_seconds: _Seconds = 30.0
    """How long after such a signal the process is left to live by whoever sent it, in seconds. A
    warning says if a step and a save take longer."""

    leave_after_seconds: float | None = Field(default=None, ge=0, le=_LONGEST)
    """How long a cluster trains on after such a signal, in seconds, before it leaves a run over
    links whose others go on. If so many are told meanwhile that the rest would be no majority, all
    save and end. null: a sixth of `grace_seconds`."""

    quorum_wait_seconds: float = Field(default=600.0, ge=0, le=_LONGEST)
    """How long a cluster that cannot go on without those who are lost, having saved, waits for
    them, in seconds, before it ends with exit status 1. Over links with `link.members`, with
    DeepSpeed and plain PyTorch. 0: it ends at once."""

    interface: _Text | None = None
    """The network interface towards the other clusters, such as "eth1"; null: that of the address
    which the host's name stands for, over links the one that leads to the other members."""


class GuardConfig(BaseModel):
    """What is done where outer training goes wrong by figures that cost nothing."""

    model_config = _STRICT

    action: GuardAction = "warn"
    """"warn" says in one sentence which fragment, round and figure are out of bounds, and what to
    do; "step_down" does so, too, and then takes a lower outer rate, half of H, or no overlap, one
    after another while it lasts; "off" measures nothing."""


class StateConfig(BaseModel):
    """Where the outer state lives: anchor, momentum and the like."""

    model_config = _STRICT

    device: Literal["masters", "host", "disk"] = "masters"
    """With the fp32 masters, sharded as they are, or in pinned host memory: then it takes nothing
    on the accelerator, and the outer step runs at the host's speed. Or in files in `dir` ("disk"),
    and with it what is kept of transfers to make them again: then it takes little on the host."""

    dir: _Text | None = None
    """The folder for "disk", there on every host, best on an NVMe disk of its own; its files have
    no name, and are gone with the run."""

    @property
    def is_on_host(self) -> bool:
        """Whether outer steps are taken on the host, where the state is not with the masters."""
        return self.device != "masters"

    @property
    def folder(self) -> Path | None:
        """The folder of the outer state's files, if it is in files."""
        return None if self.dir is None else Path(self.dir)

    @property
    def where(self) -> str:
        """Where the outer state lives, in words."""
        return f"with the {self.device}" if self.dir is None else f"on disk, in {self.dir}"


class CodingConfig(BaseModel):
    """What codes, factors and sums of transfers may take of a host."""

    model_config = _STRICT

    cores: int | None = Field(default=None, ge=1, le=4096)
    """The most cores that a rank's coding threads keep busy; null: those of its own that training
    leaves, at least one."""

    factors: Literal["accelerator", "host"] | None = None
    """Where factors of `low_rank` are made: on the rank's accelerator, in a stream of their own, or
    on the host's cores; null: on the accelerator that the outer state is on, where it is on one and
    means travel in codes."""

    def makes_factors_there(self, is_state_there: bool) -> bool:
        """Return whether a codec that makes factors does so on an accelerator, if there is any.

        `is_state_there`: the outer state is on one.
        """
        return is_state_there if self.factors is None else self.factors == "accelerator"


class Block(BaseModel):
    """The "dsx" block as it is written: axes hold what overrides the preset, and are read later."""

    model_config = _STRICT

    preset: Any
    """The named method that fills every axis; any key of an axis overrides one of its values."""

    clusters: ClustersConfig
    """Who takes part, and how they meet."""

    fragments: dict[str, Any] = {}
    """Which parameters are synchronised together."""

    schedule: dict[str, Any] = {}
    """At which inner steps which fragments are sent; `interval` is H, the period."""

    delay: dict[str, Any] = {}
    """How late a mean is applied, and how it is merged with the progress made meanwhile."""

    outer_optimizer: dict[str, Any] = {}
    """The step that the anchor takes along the averaged pseudo-gradient."""

    staleness: dict[str, Any] = {}
    """What is done to a pseudo-gradient that comes late, before the outer step sees it."""

    compression: dict[str, Any] = {}
    """How pseudo-gradients are coded on the wire."""

    control: dict[str, Any] = {}
    """What may change H and the rank while training."""

    state: StateConfig = StateConfig()
    """Where the outer state lives."""

    coding: CodingConfig = CodingConfig()
    """What coding may take of a host."""

    link: LinkConfig = LinkConfig()
    """How a transfer uses the network."""

    checkpoints: CheckpointsConfig = CheckpointsConfig()
    """What becomes of checkpoints that are saved."""

    divergence: DivergenceConfig = DivergenceConfig()
    """When training counts as diverged, and whether it goes back to the last good checkpoint."""

    guard: GuardConfig = GuardConfig()
    """What is done where outer training goes wrong by figures that cost nothing."""

    metrics: MetricsConfig = MetricsConfig()
    """Where the records of a run go."""

    plan: PlanConfig = PlanConfig()
    """What the run is planned for, as `dsx dry-run`, `dsx memory`, `dsx plan` and `dsx doctor` read
    it where their options do not say it."""


def check_coding(coding: CodingConfig, compression: Compressor, name: str) -> None:
    """Raise ConfigError for a place of factors where there are none, or would not come out alike.

    `name` is the compression's.
    """
    if coding.factors is None or compression.makes_factors:
        return
    if not compression.takes_turns:
        raise ConfigError(
            f"dsx.coding.factors={coding.factors!r} has no effect with compression.type={name!r}, "
            "which makes no factors: leave it out, or set the type to 'low_rank'"
        )
    if coding.factors == "accelerator":
        raise ConfigError(
            "dsx.coding.factors='accelerator' with compression.factor_wire='fp32': means would be "
            "rounded by each cluster's own device; set factor_wire to 'int8' or 'int4', or factors "
            "to 'host'"
        )


def check_state(state: StateConfig) -> None:
    """Raise ConfigError for files without a folder, and for a folder without files."""
    if state.device == "disk" and state.dir is None:
        raise ConfigError(
            'dsx.state.dir is missing: device="disk" needs a folder, there on every host; write '
            '"state": {"device": "disk", "dir": "/nvme/dsx"}'
        )
    if state.device != "disk" and state.dir is not None:
        raise ConfigError(
            f"dsx.state.dir={shown(state.dir)} has no effect with device={state.device!r}: set "
            'device to "disk", or leave it out'
        )


def check_address(clusters: ClustersConfig) -> None:
    """Raise ConfigError for an address at which no clusters can meet."""
    if clusters.rendezvous != "env://":
        try:
            parse_address(clusters.rendezvous)
        except ValueError as error:
            raise ConfigError(f"dsx.{error}") from error


def check_clusters(clusters: ClustersConfig) -> None:
    """Raise ConfigError unless a launch can be started with these."""
    if clusters.rendezvous == "env://" and clusters.store == "standalone":
        raise ConfigError(
            "dsx.clusters.store='standalone' needs an address: set rendezvous (or "
            "--dsx-rendezvous) to the tcp://host:port where `dsx rendezvous` listens"
        )
    if clusters.cluster_id is not None and clusters.cluster_id >= clusters.num_clusters:
        raise ConfigError(
            f"dsx.clusters.cluster_id={clusters.cluster_id} must be below num_clusters="
            f"{clusters.num_clusters}: clusters count from 0; give 0 to {clusters.num_clusters - 1}"
        )
    for name in clusters.preemption_signals:
        if name not in _SIGNALS:
            raise ConfigError(
                f"dsx.clusters.preemption_signals names {name!r}; choose among "
                f"{', '.join(sorted(_SIGNALS))}"
            )
