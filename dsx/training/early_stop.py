"""An early stop that all clusters take at the same step, asked for by any rank of any of them.

A cluster that just stopped would leave the others waiting for its next transfer. So a request is a
notice (notices.py), which all ranks of all clusters have from the same step on.
"""

from __future__ import annotations

import logging

from dsx.training.notices import Due, Notices

_KIND = "stop"
logger = logging.getLogger(__name__)


class StopAgreement:
    """One rank's view of the first request that took effect; `speaks` is whether it tells of it."""

    def __init__(self, notices: Notices, speaks: bool) -> None:
        self._notices = notices
        self._speaks = speaks
        self._is_wanted = False
        self._agreed: Due | None = None

    def request(self, reason: str) -> None:
        """Ask for a stop; only notes it, so it may be called from a signal handler."""
        if not self._is_wanted:
            self._is_wanted = True
            self._notices.post(_KIND, reason)

    def is_due(self, step: int) -> bool:
        """Whether to stop now, `step` inner steps having been taken; to be asked at every step."""
        requests = self._notices.due(_KIND)
        if self._agreed is None and requests:
            self._take(requests[0], step)
        return self._agreed is not None

    def _take(self, request: Due, step: int) -> None:
        self._agreed = request
        if request.step < step:
            raise RuntimeError(
                f"step {step}: cluster {request.cluster} asked for a stop, agreed on for step "
                f"{request.step}, which this cluster has passed; ask should_stop() at "
                "every step, in all clusters"
            )
        if self._speaks:
            logger.warning(
                "step %d: all clusters stop after this step, as cluster %d asked: %s",
                step, request.cluster, request.payload,
            )  # fmt: skip
