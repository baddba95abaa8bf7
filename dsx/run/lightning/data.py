"""Training loaders, cut once per cluster; loaders for evaluation stay in the cluster.

In the midst of an epoch Lightning resumes with its first batch again, unless the loader keeps its
place itself; here the batches that were taken are passed over.

What all clusters share is read as it would be by one world of all ranks: by a DistributedSampler
that counts them all, or of a stream every C-th example. What is a cluster's own (`clusters.data`,
or by a look at three samples) is read whole by it.
"""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from dsx.config.files import ConfigError
from dsx.engines.deepspeed.data import source_of
from dsx.run.data import cut_for_cluster
from dsx.run.lightning.fit import Fit, fit_of
from dsx.run.lightning.hooks import around, around_property, modules_of
from dsx.training.data_sources import share_data

logger = logging.getLogger(__name__)


def replace_loaders(root: str) -> None:
    """Let a Trainer cut what it trains on."""
    module = modules_of(root)
    connector = module("trainer.connectors.data_connector")._DataConnector
    around(connector, "_prepare_dataloader", _prepare)
    around(connector, "_requires_distributed_sampler", _requires_sampler)
    epoch_loop = module("loops.training_epoch_loop")._TrainingEpochLoop
    around(epoch_loop, "on_run_start", _pass_over)
    around(epoch_loop, "reset", _reset)
    around_property(module("trainer.trainer").Trainer, "distributed_sampler_kwargs", _sampler)


def _prepare(original: Any, connector: Any, dataloader: Any, shuffle: bool, mode: Any) -> Any:
    """Return a loader as Lightning does, one for training with this cluster's part of its data.

    Collective over all ranks of all clusters for training.
    """
    fit = fit_of(connector.trainer)
    if fit is None or str(getattr(mode, "value", mode)) != "train":
        return original(dataloader, shuffle, mode)
    if not isinstance(dataloader, DataLoader):
        if fit.world.rank == 0:
            logger.warning(
                "the training loader is a %s, not a torch DataLoader: dsx does not divide what it "
                "reads; give each cluster its own part", type(dataloader).__name__,
            )  # fmt: skip
        return original(dataloader, shuffle, mode)
    loader: Any = dataloader
    if isinstance(loader.dataset, IterableDataset):
        return original(_with_own_stream(loader, fit), shuffle, mode)
    if isinstance(loader.sampler, DistributedSampler):
        return original(loader, shuffle, mode)  # was cut as the script made it
    if not connector.trainer._accelerator_connector.use_distributed_sampler:
        _refuse_uncut(fit)
        return original(loader, shuffle, mode)
    is_split = share_data(fit.world.rendezvous, fit.session.whose_data, [source_of(loader.dataset)])
    _tell(loader.dataset, is_split, fit)
    fit.session.has_own_data |= not is_split
    fit.cut = _places(fit, is_split)
    is_one_rank = not connector.trainer._accelerator_connector.is_distributed
    try:
        if is_one_rank:  # in whose Trainer nothing is shuffled that the script has not
            shuffle = isinstance(loader.sampler, RandomSampler)
        return original(loader, shuffle, mode)
    finally:
        fit.cut = None


def _refuse_uncut(fit: Fit) -> None:
    """Refuse a loader that all clusters would read alike, unless each has data of its own."""
    if fit.session.whose_data != "own":
        raise ConfigError(
            "Trainer(use_distributed_sampler=False) leaves the training loader as it is, and all "
            "clusters would read the same: leave it out, give the loader a DistributedSampler, or "
            "say --dsx-data own where each cluster has data of its own"
        )


def _places(fit: Fit, is_split: bool) -> dict[str, int]:
    world = fit.world
    if not is_split:
        return {"num_replicas": world.world_size, "rank": world.rank}
    return {
        "num_replicas": world.world_size * world.num_clusters,
        "rank": world.cluster_id * world.world_size + world.rank,
    }


def _with_own_stream(loader: Any, fit: Fit) -> Any:
    own = copy.copy(loader)
    # a DataLoader refuses another dataset, and reads this attribute when it is iterated
    vars(own)["dataset"] = cut_for_cluster(loader.dataset, fit.world, fit.session.whose_data)
    return own


def _requires_sampler(original: Any, connector: Any, dataloader: Any) -> bool:
    fit = fit_of(connector.trainer)
    return original(dataloader) if fit is None or fit.cut is None else True


def _sampler(original: Any, trainer: Any) -> Any:
    fit = fit_of(trainer)
    if fit is None:
        return original()
    return dict(fit.cut or {"num_replicas": fit.world.world_size, "rank": fit.world.rank})


def _reset(original: Any, loop: Any) -> None:
    with warnings.catch_warnings():
        if fit_of(loop.trainer) is not None:  # what it warns of, `_pass_over` sees to
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
        original()


def _pass_over(original: Any, loop: Any, data_fetcher: Any) -> None:
    """Begin an epoch behind the batches that were taken of it before a checkpoint was saved."""
    fit, taken = fit_of(loop.trainer), loop.batch_progress.current.ready
    loaders = data_fetcher.combined_loader.flattened
    if fit is not None and not any(hasattr(loader, "load_state_dict") for loader in loaders):
        for _ in range(taken):
            is_ahead = bool(getattr(data_fetcher, "batches", None))  # of a loader without a length
            next(data_fetcher if is_ahead else data_fetcher.iterator)
    original(data_fetcher)


def _tell(data: Any, is_split: bool, fit: Fit) -> None:
    world = fit.world
    if world.rank:
        return
    whole = len(data)
    part = whole // world.num_clusters if is_split else whole
    what = f"{part:,} of {whole:,} samples" if is_split else "all of its own training data"
    logger.warning("dsx: cluster %d reads %s", world.cluster_id, what)
