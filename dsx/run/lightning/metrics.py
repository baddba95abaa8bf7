"""Metrics that the Trainer decides by: cluster 0's everywhere, so that all clusters do the same.

Validation sees one model in all clusters, but each on its own machines, or on data of its own; what
is logged in training is of a cluster's own batches. Which checkpoint is best, what it is called and
what a plateau is must not differ.
"""

from __future__ import annotations

from typing import Any

import torch

from dsx.run.lightning.fit import Fit, fit_of
from dsx.run.lightning.hooks import around, around_property, modules_of


def replace_metrics(root: str) -> None:
    """Let the Trainer read agreed metrics where it decides."""
    module = modules_of(root)
    logger_connector = module("trainer.connectors.logger_connector.logger_connector")
    around_property(logger_connector._LoggerConnector, "callback_metrics", _callback_metrics)
    around(module("callbacks.model_checkpoint").ModelCheckpoint, "_monitor_candidates", _candidates)
    epoch_loop = module("loops.training_epoch_loop")._TrainingEpochLoop
    around(epoch_loop, "_get_monitor_value", _monitor_value)


def agree_on_validation(trainer: Any, fit: Fit) -> dict[str, float]:
    """Take cluster 0's metrics of the validation that ends; return them. Collective."""
    told = trainer._logger_connector.metrics["callback"]
    agreed = _agreed(fit, told)
    fit.metrics = {name: value for name, value in agreed.items() if name in told}
    return {name: float(value) for name, value in fit.metrics.items()}


def _agreed(fit: Fit, values: dict[str, Any]) -> dict[str, Any]:
    """Return values with cluster 0's numbers in their place. Collective over all clusters."""
    numbers = {n: float(v) for n, v in values.items() if _is_number(v)}
    first = fit.require_handle().gather(numbers)[0]
    return {n: _like(v, first[n]) if n in first else v for n, v in values.items()}


def _is_number(value: Any) -> bool:
    is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1
    return is_scalar or isinstance(value, (int, float))


def _like(value: Any, number: float) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, number)
    return type(value)(number)


def _callback_metrics(original: Any, connector: Any) -> Any:
    metrics = original()
    fit = fit_of(connector.trainer)
    if fit is not None and fit.is_training:
        metrics.update(fit.metrics)
    return metrics


def _candidates(original: Any, callback: Any, trainer: Any) -> Any:
    """Return what a ModelCheckpoint chooses and names by, where it is about to save."""
    found = original(trainer)
    fit = fit_of(trainer)
    is_alone = fit is None or not fit.is_training or fit.require_handle().preemption.is_saving
    return found if fit is None or is_alone else _agreed(fit, found)


def _monitor_value(original: Any, loop: Any, key: str) -> Any:
    value, fit = original(key), fit_of(loop.trainer)
    if fit is None or not fit.is_training or value is None:
        return value
    return _agreed(fit, {key: value})[key]
