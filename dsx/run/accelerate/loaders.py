"""`DataLoader`, as a loop over Accelerate makes it: what is trained on is cut once per cluster.

A loader that shuffles is for training, and is made over this cluster's part of its dataset, so that
its length, from which scripts take the length of their schedules, is what the cluster reads. One
that does not shuffle is for evaluation, and reads everything. A stream does not shuffle: it is for
training if the model is in training mode (`model.train()`) where a loop over it begins. Where
`clusters.data` is "own", each site has data of its own, and all loaders stay as they are.

Within the cluster Accelerate divides on. A step that is trained on a loader which was left whole is
refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from dsx.comm.world import World, current_world
from dsx.config.files import ConfigError
from dsx.engines.deepspeed.data import source_of
from dsx.run.data import ClusterStream, is_cut, part_for_cluster, whole_of
from dsx.run.replace import around
from dsx.run.session import Session
from dsx.training.data_sources import share_data


class StreamOfLoop(ClusterStream):
    """A stream, of which a loop that trains reads every C-th example, and another one all."""

    is_cut_for_cluster = False

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if self.is_cut_for_cluster else iter(self._stream)


def replace_loader(session: Session) -> None:
    """Let loaders that are made from now on read this cluster's part, if they are for training."""

    def make(original: Any, self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        world = current_world()
        is_left = session.has_arguments or not session.has_accelerator
        is_left = is_left or world is None or session.whose_data == "own"
        if world is None or is_left or is_cut(dataset) or _stream_of(dataset) is not None:
            return original(self, dataset, *args, **kwargs)
        if isinstance(dataset, IterableDataset):
            dataset = StreamOfLoop(dataset, world.cluster_id, world.num_clusters)
            return original(self, dataset, *args, **kwargs)
        part, args, kwargs = _of_cluster(dataset, args, kwargs, world)
        return original(self, part, *args, **kwargs)

    def begin(original: Any, self: Any) -> Any:
        stream = _stream_of(self.dataset)
        if stream is not None:
            stream.is_cut_for_cluster = any(model.training for model in session.models)
        return original(self)

    around(DataLoader, "__init__", make)
    around(DataLoader, "__iter__", begin)


def _stream_of(data: Any) -> StreamOfLoop | None:
    """Return what is read through whatever divides it within the cluster."""
    while data is not None and not isinstance(data, StreamOfLoop):
        data = getattr(data, "dataset", None)
    return data


def _of_cluster(
    dataset: Any, args: tuple[Any, ...], kwargs: dict[str, Any], world: World
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the dataset and the arguments behind it as they are for this cluster."""
    names = ("batch_size", "shuffle", "sampler", "batch_sampler")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    sampler, batches = given.get("sampler"), given.get("batch_sampler")
    if type(batches) is BatchSampler and _takes_all(batches.sampler, dataset):
        part = part_for_cluster(dataset, world)
        batches = BatchSampler(_over(batches.sampler, part), batches.batch_size, batches.drop_last)
        given["batch_sampler"] = batches
    elif _takes_all(sampler, dataset):
        part = part_for_cluster(dataset, world)
        given["sampler"] = _over(sampler, part)
    elif given.get("shuffle") and sampler is None and batches is None:
        part = part_for_cluster(dataset, world)
    else:
        return dataset, args, kwargs
    return part, args[len(names) :], given


def _takes_all(sampler: Any, dataset: Any) -> bool:
    """Whether a sampler shuffles a dataset, each sample once."""
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(dataset)
    )


def _over(sampler: Any, part: Any) -> RandomSampler:
    return RandomSampler(part, generator=sampler.generator)


def require_cut(session: Session, loaders: list[Any]) -> None:
    """Raise ConfigError if none of the loaders that are open reads this cluster's part only."""
    if not loaders or session.whose_data == "own":
        return
    if any(is_cut(getattr(loader, "dataset", None)) for loader in loaders):
        return
    raise ConfigError(
        "accelerator.backward() inside a loop over a DataLoader that reads the whole of "
        f"{type(loaders[-1].dataset).__name__}, as for evaluation: all clusters would train on the "
        "same batches. dsx.run cuts a loader that shuffles each sample once (shuffle=True), and a "
        "stream that is read with the model in training mode (model.train()); with data of each "
        "site's own set clusters.data='own' (DSX_DATA=own), which cuts nothing"
    )


def require_not_made_before(session: Session, given: tuple[Any, ...]) -> None:
    """Raise ConfigError for a loader that was made while nobody knew of a world, and shuffles."""
    if session.whose_data == "own":
        return
    for loader in given:
        if not isinstance(loader, DataLoader) or is_cut(loader.dataset):
            continue
        if _stream_of(loader.dataset) is not None:
            continue
        is_stream = isinstance(loader.dataset, IterableDataset)
        if is_stream or _takes_all(loader.sampler, loader.dataset):
            raise ConfigError(
                "a DataLoader was made before the script had made its Accelerator, and it is "
                "prepared for training: make the Accelerator first, then the loader; where only "
                'the DeepSpeed JSON has the "dsx" block, make the loader behind the '
                "DeepSpeedPlugin, too, or give the block to the launch (--dsx-config FILE)"
            )


def require_shared(session: Session, world: World, given: tuple[Any, ...]) -> None:
    """Raise ConfigError, in all clusters, where what was cut is not the same in all of them.

    For `clusters.data` "auto". Collective over all ranks of all clusters if there is a loader that
    was cut: the clusters look at three samples of each, as for `training_data`.
    """
    loaders = [one for one in given if isinstance(one, DataLoader)]
    whole = [data for loader in loaders if (data := whole_of(loader.dataset)) is not None]
    if session.whose_data != "auto" or not whole:
        return
    if not share_data(world.rendezvous, "auto", [source_of(data) for data in whole]):
        raise ConfigError(
            "clusters.data='auto', and the clusters have different training data, of which each "
            f"would read one part in {world.num_clusters}, as its DataLoader was cut when it was "
            "made: set clusters.data='own' (DSX_DATA=own), with which each reads all of its own, "
            "or 'split', which leaves it so"
        )
