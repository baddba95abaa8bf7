"""An early stop that all clusters take at the same step, asked for by any rank of any of them.

A cluster that just stopped would leave the others waiting for its next transfer. So a request
names a step far enough ahead that no cluster can have passed it: while transfers bind the clusters
to each other, one is fewer than (n + 2) H steps ahead of another, n being the rounds that stay
under way. The request is one key in the rendezvous store, written once; every rank reads it every
H steps, which costs a round trip to the store, and so has read it by the step that it names.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from dsx.comm.rendezvous import Rendezvous

logger = logging.getLogger(__name__)


class StopAgreement:
    """One rank's view of the request under a `name`; `interval` is the largest H."""

    def __init__(
        self, rendezvous: Rendezvous, name: str, interval: int, rounds_under_way: int
    ) -> None:
        self._rendezvous = rendezvous
        self._name = name
        self._interval = interval
        self._rounds_ahead = rounds_under_way + 2
        self._wanted: str | None = None
        self._agreed: dict[str, Any] | None = None

    def request(self, reason: str) -> None:
        """Ask for a stop; only notes it, so it may be called from a signal handler."""
        self._wanted = reason

    def is_due(self, step: int) -> bool:
        """Whether to stop now, `step` inner steps having been taken; to be asked at every step."""
        if self._wanted is not None and self._agreed is None:
            self._ask(step, self._wanted)
        if self._agreed is None and step % self._interval == 0:
            told = self._rendezvous.look(self._name)
            self._take(told, step)
        return self._agreed is not None and step >= self._agreed["step"]

    def _ask(self, step: int, reason: str) -> None:
        last = (step // self._interval + 1 + self._rounds_ahead) * self._interval
        wish = {"step": last, "cluster": self._rendezvous.cluster_id, "reason": reason}
        self._take(self._rendezvous.say_once(self._name, json.dumps(wish)), step)

    def _take(self, told: str | None, step: int) -> None:
        if told is None:
            return
        self._agreed = json.loads(told)
        assert self._agreed is not None
        if self._agreed["step"] < step:
            raise RuntimeError(
                f"step {step}: cluster {self._agreed['cluster']} asked for a stop after step "
                f"{self._agreed['step']}, which this cluster has passed; ask should_stop() at "
                "every step, in all clusters"
            )
        if not self._rendezvous.is_speaker:
            return
        logger.warning(
            "step %d: all clusters stop after step %d, as cluster %d asked: %s",
            step, self._agreed["step"], self._agreed["cluster"], self._agreed["reason"],
        )  # fmt: skip
