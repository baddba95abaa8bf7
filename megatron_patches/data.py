"""Every cluster reads samples of its own: without this all would read the very same ones.

Wraps the samplers as if the data-parallel ranks of all clusters were ranks of one world: of every
C batches' samples cluster m takes the m-th part. The number of samples that datasets are built for
grows accordingly. Positions stay each cluster's own, so checkpoints are as ever. `--dataloader-type
external` builds no sampler here: those scripts split their data themselves.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from megatron_patches import probe
from megatron_patches.run import Run

_SAMPLERS = ("MegatronPretrainingSampler", "MegatronPretrainingRandomSampler")
_PARAMETERS = ("consumed_samples", "data_parallel_rank", "data_parallel_size")


def patch(run: Run) -> None:
    """Split the samples between the clusters."""
    clusters, own = run.world.num_clusters, run.world.cluster_id
    samplers = probe.module(
        "megatron.training.datasets.data_samplers", "megatron.legacy.data.data_samplers"
    )
    for name in _SAMPLERS:
        kind = getattr(samplers, name, None)
        if kind is None:
            raise probe.UnknownMegatron(
                f"{samplers.__name__} has no {name}; checked: {probe.CHECKED}"
            )
        _split(kind, clusters, own)
    training = probe.training()
    count = probe.function(training, "get_train_valid_test_num_samples")

    @functools.wraps(count)
    def get_train_valid_test_num_samples(*args: Any, **kwargs: Any) -> Any:
        return tuple(n and n * clusters for n in count(*args, **kwargs))

    training.get_train_valid_test_num_samples = get_train_valid_test_num_samples


def _split(kind: Any, clusters: int, own: int) -> None:
    """Let a sampler's ranks be those of one cluster among all."""
    original = probe.function(kind, "__init__", _PARAMETERS)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        given = call.arguments
        given["consumed_samples"] *= clusters
        given["data_parallel_rank"] += own * given["data_parallel_size"]
        given["data_parallel_size"] *= clusters
        original(*call.args, **call.kwargs)

    kind.__init__ = __init__
