"""Build a run's ranks from its files, and sum up what they come to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dsx.bench.dry_run.asked import Asked, Rates, rates_of, require_rates
from dsx.bench.dry_run.figures import StageFigures, figures_of
from dsx.config.files import read_json
from dsx.config.flags import block_of_flags
from dsx.config.schema import DsxConfig, load_config
from dsx.core.requirements import installed_version
from dsx.core.types import Stage
from dsx.method.schedule.periodic import Periodic, Streaming
from dsx.plan.launch_cost import launch_cost
from dsx.plan.link import Costs
from dsx.plan.model_files import ModelFiles, read_model, read_words, require_served
from dsx.plan.predict import predict
from dsx.plan.start_time import StartModel, start_model
from dsx.training.divergence import refuse_stages

_BUCKETS = "gradients cut into buckets, by which ranks own other parameters"
# flags that lay out a model or its masters otherwise than what is built, and what that is
_NOT_BUILT = {
    "--overlap-grad-reduce": _BUCKETS,
    "--ddp-bucket-size": _BUCKETS,
    "--ddp-num-buckets": _BUCKETS,
}


@dataclass(frozen=True)
class DryRun:
    """A run that has been built; `stages` are all of a cluster's, `built` those that were built."""

    asked: Asked
    files: ModelFiles
    config: DsxConfig
    stages: Sequence[StageFigures]
    built: Sequence[int]

    @property
    def parameters(self) -> int:
        """All parameters that the ranks serve, each once."""
        ranks = [rank for stage in self.stages for rank in stage.ranks]
        return sum(f.numel for rank in ranks for f in rank.built.fragments)

    @property
    def active_parameters(self) -> int:
        """Those that a token goes through: of experts only the ones that take it."""
        model = self.files.model
        return self.parameters - model.numel + model.active_numel

    @property
    def num_clusters(self) -> int:
        """C."""
        return self.config.clusters.num_clusters

    @property
    def sends_all_once(self) -> bool:
        """Whether every fragment leaves once in a round, whatever the run measures."""
        return type(self.config.method.schedule) in (Periodic, Streaming)

    @property
    def goes_over_gloo(self) -> bool:
        """Whether clusters are joined by gloo, whose connections are counted here."""
        return not self.config.link.uses_links

    @cached_property
    def rates(self) -> Rates:
        """The line, the step and the disk that seconds are of."""
        return rates_of(self.asked, self.files, self._active)

    @property
    def _active(self) -> int:
        """Those that a token goes through; not asked for where a step's seconds are given."""
        return 0 if self.asked.step_seconds is not None else self.active_parameters

    @property
    def utilization(self) -> float:
        """The share of the time that is computing, of the planner's model."""
        rates = self.rates
        ranks = [rank.wire for stage in self.stages for rank in stage.ranks]
        blocking, cores = launch_cost().seconds_per_element, self.config.coding.cores
        costs = Costs(blocking_seconds_per_element=blocking, cores=cores)
        clusters, method = self.num_clusters, self.config.method
        return predict(method, ranks, rates.step_seconds, rates.link, clusters, costs).utilization

    @property
    def most_sent(self) -> int:
        """What the cluster that sends most sends of every fragment once."""
        stages = [stage.bytes_sent for stage in self.stages]
        return max(sum(sizes) for sizes in zip(*stages, strict=True))

    @property
    def save_seconds(self) -> float:
        """What writing the largest rank's outer state takes at the disk's rate."""
        return max(stage.saved for stage in self.stages) / (self.rates.disk_mb_s * 1e6)

    @property
    def hash_seconds(self) -> float:
        """What the digests of the largest rank's masters take, on cores as the model's."""
        ranks = [rank for stage in self.stages for rank in stage.ranks]
        largest = max(sum(f.numel for f in rank.built.fragments) for rank in ranks)
        return self.start_model.hash_seconds(4 * largest)

    @property
    def start_model(self) -> StartModel:
        """What says how long a start takes: that of gloo, or of links."""
        return start_model("gloo" if self.goes_over_gloo else "link")

    @property
    def start_seconds(self) -> float:
        """What a start from equal weights takes, by plan/start_time.py."""
        fragments = max(len(rank.used) for stage in self.stages for rank in stage.ranks)
        terms = self.start_model.terms(
            self.num_clusters, self.files.cluster.ranks, 2e-3 * self.rates.latency_ms, fragments,
            self.config.link.streams,
        )  # fmt: skip
        return terms.total + self.hash_seconds

    @property
    def start_seconds_unequal(self) -> float:
        """The same where all weights differ, and go over the line once."""
        return self.start_seconds + 4 * self.parameters / self.rates.link.payload_bytes_per_second

    def record(self) -> dict[str, Any]:
        """Return it as JSON values; None: cannot be said before the run."""
        ranks = [rank for stage in self.stages for rank in stage.ranks]
        streams, clusters = self.config.link.streams, self.num_clusters
        sockets = max(rank.connections(clusters, streams) for rank in ranks)
        return {
            "params": self.parameters,
            "active_params": self.active_parameters,
            "ranks": self.files.cluster.ranks,
            "clusters": clusters,
            "built_stages": list(self.built),
            "lanes": sum(stage.lanes for stage in self.stages),
            "fragments_per_stage": [len(stage.ranks[0].wire) for stage in self.stages],
            "host_bytes_per_rank": max(stage.on_host for stage in self.stages),
            "memory_by_part": vars(max(self.stages, key=lambda s: s.memory.total).memory),
            "device_bytes_per_rank": max(stage.on_device for stage in self.stages),
            "disk_bytes_per_rank": max(stage.on_disk for stage in self.stages),
            "lent_bytes_per_rank": max(stage.lent for stage in self.stages),
            "sockets_per_rank": sockets if self.goes_over_gloo else None,
            "threads_per_rank": max(r.threads for r in ranks) if self.goes_over_gloo else None,
            "bytes_per_round_per_rank": max(rank.most_sent for rank in ranks)
            if self.sends_all_once
            else None,
            "bytes_per_round_per_cluster": self.most_sent if self.sends_all_once else None,
            "owner_spread": max(stage.spread for stage in self.stages),
            "save_bytes_per_rank": max(stage.saved for stage in self.stages),
            "start_seconds": self.start_seconds,
            "start_seconds_unequal": self.start_seconds_unequal,
            "save_seconds": self.save_seconds,
            "utilization": self.utilization,
            "assumed": {name: value for name, (value, _) in self.rates.assumed.items()},
        }


def build(asked: Asked) -> DryRun:
    """Build what was asked for; ValueError for what would fail, or is not served."""
    is_json = asked.source.suffix == ".json"
    require_rates(asked)
    _require_engine(is_json)
    files = read_model(asked.source, asked.model, asked.ranks)
    document = read_json(asked.source) if is_json else block_of_flags(read_words(asked.source))
    config = load_config(_with_clusters(document, asked.clusters))
    require_served(config.method, files.cluster)
    config.method.validate(num_clusters=config.clusters.num_clusters)
    refuse_stages(config.divergence, files.cluster.pipeline)
    wanted = _stages(asked.build, files)
    if not is_json:
        _require_built(asked.source)
    of_stage = _deepspeed_stage if is_json else _megatron_stage
    built = {stage: of_stage(files, config, stage, document) for stage in wanted}
    count = files.cluster.pipeline
    stages = [built[_like(i, built, files)].at(Stage(i, count)) for i in range(count)]
    return DryRun(asked, files, config, stages, sorted(built))


def _deepspeed_stage(
    files: ModelFiles, config: DsxConfig, stage: int, document: Mapping[str, Any]
) -> StageFigures:
    from dsx.bench.dry_run.deepspeed import build_ranks

    ranks = build_ranks(files.model, files.cluster, document, config, stage)
    return figures_of(ranks, config)


def _megatron_stage(
    files: ModelFiles, config: DsxConfig, stage: int, document: Mapping[str, Any]
) -> StageFigures:
    from dsx.bench.dry_run.megatron import build_rank, ranks_of_stage

    cluster = files.cluster
    ranks = [
        build_rank(files.model, cluster, files.batch, config, rank)
        for rank in ranks_of_stage(cluster, stage)
    ]
    return figures_of(ranks, config)


def _kind(stage: int, files: ModelFiles) -> tuple[object, ...]:
    """Return what stages that are alike have in common.

    First, last, which layers have experts, and of DeepSpeed's pipelines what each layer holds.
    """
    cluster, experts = files.cluster, files.model.experts
    count, held = cluster.pipeline, ()
    layers = cluster.layers_of(files.model, stage)
    has = tuple(experts is not None and experts.layers[layer] for layer in layers)
    if cluster.partition is not None:
        own = cluster.pipeline_layers(files.model, Stage(stage, count))
        held = tuple(layer.numel(cluster.expert) for layer in own)
    return stage == 0, stage == count - 1, has, held


def _like(stage: int, built: Iterable[int], files: ModelFiles) -> int:
    """Return the built stage that a stage is like, the first of them if it is not built itself."""
    kind = _kind(stage, files)
    return stage if stage in built else min(i for i in built if _kind(i, files) == kind)


def _stages(build: Sequence[int] | None, files: ModelFiles) -> list[int]:
    """Return the stages to build; ValueError where one that is not built is like none that is."""
    cluster = files.cluster
    count, together = cluster.pipeline, cluster.ranks_per_stage
    kinds: dict[object, int] = {}
    for stage in (count // 2, *range(count)):  # a middle one, where several are alike
        kinds.setdefault(_kind(stage, files), stage)
    if build is None:
        return sorted(kinds.values())
    for rank in build:
        if not 0 <= rank < cluster.ranks:
            raise ValueError(f"--build {rank}: a cluster has ranks 0 to {cluster.ranks - 1}")
    found = {rank // together for rank in build}
    if not set(kinds) <= {_kind(stage, files) for stage in found}:
        usual = ",".join(str(stage * together) for stage in sorted(kinds.values()))
        raise ValueError(
            f"--build {','.join(map(str, build))}: of pipeline stages that are alike one has to be "
            f"among them, as no others are like the first, the last and those between; try {usual}"
        )
    return sorted(found)


def _with_clusters(document: Mapping[str, Any], clusters: int | None) -> dict[str, Any]:
    """Return a copy of a document whose "dsx" block has that number of clusters."""
    found: dict[str, Any] = json.loads(json.dumps(document))
    if clusters is not None:
        found.setdefault("dsx", {}).setdefault("clusters", {})["num_clusters"] = clusters
    return found


def _require_engine(is_json: bool) -> None:
    name, extra = ("deepspeed", "deepspeed") if is_json else ("megatron-core", "megatron")
    if installed_version(name) is None:
        raise ValueError(
            f"{name} is not installed, whose own objects a dry run builds: "
            f"pip install 'dsx-train[{extra}]'"
        )


def _require_built(source: Path) -> None:
    """Refuse flags that change what is built and are not passed on to Megatron's objects."""
    given = {word.split("=", 1)[0] for word in read_words(source)}
    for name, why in _NOT_BUILT.items():
        if name in given:
            raise ValueError(
                f"{name}: dsx dry-run does not build {why}; leave it out to see the rest of the run"
            )
