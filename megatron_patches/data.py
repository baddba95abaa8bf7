"""Which samples a cluster reads: without this all would read the very same ones.

Training data that all clusters share is split: the samplers are wrapped as if the data-parallel
ranks of all clusters were ranks of one world, so that of every C batches' samples cluster m takes
the m-th part, and the dataset is built for as many samples more. Data of each cluster's own is
read as ever. Which it is, `clusters.data` says, or the data itself. Where they are: place.py.

Validation and test data are never split: clusters validate on the same samples, in the same order.
`--dataloader-type external` builds no sampler here: those scripts divide their data themselves.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from dsx.engines.megatron.data import sources_of_arguments
from dsx.training.data_sources import Source, are_same, describe, share_data
from megatron_patches import probe
from megatron_patches.batch_size import count_by_own, grows_by
from megatron_patches.place import Place
from megatron_patches.run import Run
from megatron_patches.synchronous import require_place
from megatron_patches.tree import SAMPLER_MODULES, TAKEN_BY_SAMPLERS

_SAMPLERS = ("MegatronPretrainingSampler", "MegatronPretrainingRandomSampler")


class Division:
    """Whether the samples that are asked for now are to be divided between the clusters."""

    def __init__(self, num_clusters: int, cluster_id: int) -> None:
        self.num_clusters, self.cluster_id = num_clusters, cluster_id
        self.is_split = True  # of training data
        self.is_training = True  # what a loader is being built for
        self.datasets: tuple[Any, ...] = (None, None, None)  # of the splits, built last
        self.loaders: tuple[list[Any], ...] = ([], [], [])  # of the splits, on ranks that read
        self.place = Place()

    @property
    def parts(self) -> int:
        """Into how many parts samples are divided now."""
        return self.num_clusters if self.is_split and self.is_training else 1


def patch(run: Run) -> None:
    """Divide training samples between the clusters, where they are shared."""
    run.division = division = Division(run.world.num_clusters, run.world.cluster_id)
    samplers = probe.module(*SAMPLER_MODULES)
    for name in _SAMPLERS:
        kind = getattr(samplers, name, None)
        if kind is None:
            raise probe.UnknownMegatron(
                f"{samplers.__name__} has no {name}; checked: {probe.CHECKED}"
            )
        _divide(kind, division)
    training = probe.training()
    count = probe.function(training, "get_train_valid_test_num_samples")
    make = probe.function(training, "build_train_valid_test_datasets")
    load = probe.function(training, "build_pretraining_data_loader", ["dataset"])

    @functools.wraps(count)
    def get_train_valid_test_num_samples(*args: Any, **kwargs: Any) -> Any:
        train, *others = count(*args, **kwargs)
        return (train and division.place.of(train, division.parts), *others)

    @functools.wraps(make)
    def build_train_valid_test_datasets(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        division.datasets = tuple(made)
        return made

    @functools.wraps(load)
    def build_pretraining_data_loader(dataset: Any, *args: Any, **kwargs: Any) -> Any:
        division.is_training = dataset is division.datasets[0]
        try:
            loader = load(dataset, *args, **kwargs)
        finally:
            division.is_training = True
        if loader is not None:
            split = next((i for i, d in enumerate(division.datasets) if d is dataset), None)
            if split is not None:
                division.loaders[split].append(loader)
        return loader

    training.get_train_valid_test_num_samples = get_train_valid_test_num_samples
    training.build_train_valid_test_datasets = build_train_valid_test_datasets
    training.build_pretraining_data_loader = build_pretraining_data_loader


def agree(run: Run, arguments: Any, begins_plain: bool = False) -> None:
    """Decide whether training data is split, and say what is read. Collective over all clusters.

    With `begins_plain` clusters begin behind what a run without dsx has read of it.
    """
    rendezvous, division = run.world.rendezvous, run.division
    sources = sources_of_arguments(arguments)
    division.is_split = share_data(rendezvous, run.data, sources["train"])
    if division.is_split:
        _require_same_order(run, arguments)
    _find_place(division, arguments, begins_plain)
    count_by_own(arguments)
    places = rendezvous.gather("place in the data", division.place.begun)
    if run.world.joins is not None:  # the others have begun there
        theirs = next(place for m, place in enumerate(places) if m != run.world.cluster_id)
        division.place.begin(division.place.parts, *theirs)
    run.tell(_training_line(division, sources["train"], arguments))
    told = rendezvous.gather("validation data", [source.identity for source in sources["valid"]])
    validates = [[Source(identity, identity) for identity in own] for own in told]
    if arguments.eval_iters:
        run.tell(_validation_line(sources["valid"], are_same(validates)))


def _find_place(division: Division, arguments: Any, begins_plain: bool) -> None:
    counted = arguments.consumed_train_samples
    divides_itself = arguments.dataloader_type == "external"
    parts = 1 if divides_itself else division.parts
    is_behind = division.is_split or divides_itself
    if not begins_plain:
        saved = division.place.saved_parts
        if saved not in (None, parts) and not divides_itself:
            before = f"a run that read its data in {saved} part(s), and this one in {parts}"
            require_place(arguments, division.is_split, before)
        own_count = division.place.go_on(parts, counted, is_own=not is_behind)
        arguments.consumed_train_samples = own_count
        return
    if not divides_itself:
        require_place(arguments, division.is_split, "a run without dsx")
    division.place.begin(parts, counted, counted if is_behind else 0)


def _divide(kind: Any, division: Division) -> None:
    """Let a sampler's ranks be those of one cluster among all."""
    original = probe.function(kind, "__init__", TAKEN_BY_SAMPLERS)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        given, parts = call.arguments, division.parts
        if division.is_training:
            given["consumed_samples"] = division.place.of(given["consumed_samples"], parts)
        if parts > 1:
            given["data_parallel_rank"] += division.cluster_id * given["data_parallel_size"]
            given["data_parallel_size"] *= parts
        original(*call.args, **call.kwargs)

    kind.__init__ = __init__


def _require_same_order(run: Run, arguments: Any) -> None:
    """Refuse, in all clusters, micro-batches that would cut shared samples at different places."""
    sizes = run.world.rendezvous.gather("micro-batch", arguments.micro_batch_size)
    if len(set(sizes)) > 1:
        told = ", ".join(f"cluster {m}: {size}" for m, size in enumerate(sizes))
        raise ValueError(
            f"--micro-batch-size differs ({told}), by which shared training data is cut: give all "
            "clusters the same one; data of each cluster's own may have its own micro-batch"
        )


def _training_line(division: Division, sources: list[Source], arguments: Any) -> str:
    read = _read_in_this_run(division, arguments)
    what = f"training data: {describe(sources)}"
    if arguments.dataloader_type == "external":
        return f"{what}, which divides it itself; {read}"
    if division.is_split:
        before = division.place.of(division.place.counted_before)
        behind = f" behind the first {before:,}" if before else ""
        return (
            f"{what}, shared by all clusters: of every {division.num_clusters} parts of its "
            f"samples{behind} this cluster reads part {division.cluster_id + 1}; {read}"
        )
    return f"{what}, of this cluster's own, which it reads whole; {read}"


def _read_in_this_run(division: Division, arguments: Any) -> str:
    if grows_by(arguments) and not arguments.train_samples:
        return f"{arguments.train_iters:,} steps in this run, of batches that grow"
    samples = arguments.train_samples or arguments.train_iters * arguments.global_batch_size
    samples -= division.place.counted_before
    return f"{samples:,} samples, {samples * arguments.seq_length:,} tokens in this run"


def _validation_line(sources: list[Source], is_same: bool) -> str:
    what = f"validation data: {describe(sources)}"
    if not sources:
        return f"{what}: whether it is the same in all clusters is the script's"
    if is_same:
        return f"{what}, the same samples in all clusters"
    return (
        f"{what}, of this cluster's own: losses of different clusters do not compare; to make "
        "them, give all the same --valid-data-path (beside --train-data-path)"
    )
