"""What clusters agree on beside the means: measured seconds, and what a controller measures.

A rank posts its own averages with every transfer: moving averages of transfers, the median of its
last inner steps (a pause for validation or a checkpoint is not a step). The sideband brings the
largest of all clusters, a maximum over the cluster's ranks the largest of all ranks. Only these
enter the `History`, so schedules and controllers decide alike everywhere.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from dsx.compress.base import Channel
from dsx.core.engine import EngineAdapter
from dsx.core.membership import Seat
from dsx.core.types import History, SyncParams
from dsx.method.method import Method
from dsx.outer.sideband import Sideband

_WEIGHT_OF_NEW = 0.2  # of the moving averages
_STEPS_KEPT = 15


class Measurements:
    """One rank's measurements, on their way to being agreed."""

    def __init__(self, method: Method, adapter: EngineAdapter, place: int) -> None:
        """`place`: of the own cluster among all that the run may have."""
        self._method = method
        self._adapter = adapter
        self._place = place
        measures = (
            method.control.sideband_numel(method.sync_params) > 0 or method.schedule.uses_norms
        )
        self._is_active = method.uses_seconds or measures
        self._step_seconds: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._transfer_seconds: dict[int, float] = {}
        self._boundary_ended: float | None = None

    def begin_boundary(self, now: float) -> None:
        """Take the time since the last boundary: an inner step without communication."""
        if self._boundary_ended is not None:
            self._step_seconds.append(now - self._boundary_ended)

    def end_boundary(self, history: History) -> None:
        """Let a pipeline's stages agree, in `history`; start the clock of the next inner step."""
        self._settle_stages(history)
        self._boundary_ended = time.perf_counter()

    def post(self, sideband: Sideband, fragment: int, history: History) -> None:
        """Put this rank's averages into a transfer's sideband; 0 where there is nothing yet."""
        if self._method.uses_seconds:
            own = (
                median(self._step_seconds) if self._step_seconds else None,
                self._transfer_seconds.get(fragment),
                self._adapter.backward_seconds(fragment),
            )
            sideband.post(self._place, [seconds or 0.0 for seconds in own])

    def owner_measure(
        self, fragment: int, sync_params: SyncParams, channel: Channel, seat: Seat
    ) -> Callable[[Tensor], Tensor] | None:
        """Return what this cluster adds to the sideband: of a mean it owns, or of its matrices.

        A codec that sees the spectrum anyway tells of it: each cluster of the matrices whose P
        it averages.
        """
        control, uses_norms = self._method.control, self._method.schedule.uses_norms
        numel, layout = (
            control.sideband_numel(self._method.sync_params),
            self._adapter.fragments[fragment],
        )
        num_clusters = seat.num_clusters
        is_owner = fragment % num_clusters == seat.position
        tells_spectrum = self._method.compression.captures_spectrum and numel > 0
        if not tells_spectrum and not (is_owner and (numel or uses_norms)):
            return None

        def measure(mean: Tensor) -> Tensor:
            parts: list[Tensor] = []
            if tells_spectrum:
                assert channel.spectrum is not None
                parts.append(channel.spectrum)
            elif numel:
                parts.append(control.measure(mean, layout, sync_params))
            if uses_norms:
                parts.append(torch.dot(mean, mean).view(1) * is_owner)
            # averaged like everything in the sideband, the others' parts being 0
            return torch.cat(parts) * num_clusters

        return measure

    def _settle_stages(self, history: History) -> None:
        """Take one H for all stages of a pipeline at the ends of its periods, in place.

        Collective over the cluster's ranks then: H is one for all stages, and so is that step.
        """
        control, initial, stage = (
            self._method.control,
            self._method.sync_params,
            self._adapter.stage,
        )
        takes_turns = self._method.schedule.takes_turns
        own = control.proposal(initial, history) if stage.count > 1 else None
        if own is None:
            return
        if not history.next_settling:
            history.next_settling = history.step - 1 + initial.interval
            # alone, this moves nothing: from now on the end of a window waits for the others
            control.settle([own], takes_turns, initial, history)
        if history.step != history.next_settling:
            return
        table = torch.zeros(stage.count, len(own), dtype=torch.float64)
        table[stage.index] = torch.tensor(own, dtype=torch.float64)
        proposals = self._adapter.ranks.max_over_stages(table).tolist()
        control.settle(proposals, takes_turns, initial, history)
        history.next_settling += control.sync_params(initial, history).interval

    def take(
        self,
        sideband: Sideband,
        fragment: int,
        history: History,
        seconds: float,
        launched_with: SyncParams,
        is_refused: bool = False,
    ) -> None:
        """Bring the averaged sideband of a transfer into `history`, in place.

        Collective over the cluster's ranks if the method measures anything. `seconds` is this
        rank's own measurement of the transfer. A refused round measures no mean.
        """
        if seconds > 0:
            before = self._transfer_seconds.get(fragment)
            self._transfer_seconds[fragment] = _average(before, seconds)
        if not self._is_active:
            return
        if self._method.uses_seconds:
            step, transfer, backward = self._adapter.ranks.max_over_ranks(
                sideband.largest()
            ).tolist()
            history.step_seconds = step or history.step_seconds
            if transfer:
                history.transfer_seconds[fragment] = transfer
            if backward:
                history.backward_seconds[fragment] = backward
        control, initial = self._method.control, self._method.sync_params
        if not sideband.of_owner.numel():
            return
        measured = self._adapter.ranks.sum_over_shards(sideband.of_owner.clone()).tolist()
        if is_refused:
            return
        if self._method.schedule.uses_norms:
            history.mean_norm[fragment] = measured.pop() ** 0.5
        if measured:
            control.decide(measured, launched_with, initial, history)


def _average(before: float | None, now: float) -> float:
    return now if before is None else (1 - _WEIGHT_OF_NEW) * before + _WEIGHT_OF_NEW * now
