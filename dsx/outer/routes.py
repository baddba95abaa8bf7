"""The way of every fragment from this rank's masters to the wire and back."""

from __future__ import annotations

import logging
import warnings

from dsx.core.types import Slot
from dsx.engines.masters import Backend
from dsx.method.method import Method, SettingWarning
from dsx.outer.whole_matrices import Redistribution, plan_redistribution

logger = logging.getLogger(__name__)


def plan_routes(method: Method, backend: Backend) -> list[Redistribution]:
    """Return one route per fragment. Collective over the cluster's ranks."""
    layouts, rank = [backend.fragments], 0
    if method.compression.needs_whole_matrices:
        layouts, rank = backend.cluster_layouts()
    return plan_redistribution(layouts, rank, method.compression.takes, backend.device)


def factored(method: Method, backend: Backend) -> list[tuple[list[str], list[str]]]:
    """Return, per fragment, the matrices that travel in factors and those that do not, by name.

    Of the whole model, so the same on every rank; vectors and small matrices are left out. Empty
    unless the codec makes factors.
    """
    if not method.compression.needs_whole_matrices:
        return []
    found: list[tuple[list[str], list[str]]] = []
    for parameters in backend.fragment_parameters:
        slots = [Slot(p.name, p.shape, 0) for p in parameters]
        taken = [s.name for s in slots if method.compression.takes(s)]
        rest = [s.name for s in slots if not s.is_small and s.name not in taken]
        found.append((taken, rest))
    return found


def tell_what_is_factored(method: Method, backend: Backend) -> None:
    """Log how a low-rank codec treats this model; warn if it finds nothing to factor."""
    fragments = factored(method, backend)
    for index, (taken, rest) in enumerate(fragments):
        name = backend.stage.name_of(index)
        others = f"; as codes: {', '.join(rest)}" if rest else ""
        logger.info("%s: %d matrices travel in factors%s", name, len(taken), others)
    if fragments and not any(taken for taken, _ in fragments):
        warnings.warn(
            "compression.type='low_rank' finds no matrix to factor in this model: all are too "
            "small to save compression.min_saving at this rank, or in compression.exclude, and "
            "travel in codes; lower compression.rank, or use type 'quantized'",
            SettingWarning,
            stacklevel=2,
        )
