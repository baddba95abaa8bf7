"""The transport over links: gloo's, with lanes of one link in place of groups of its own.

What is sent, in which order, and what is done with it is the same code, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future

import torch.distributed as dist

from dsx.comm.gloo import GlooTransport
from dsx.comm.links.group import LinkGroup
from dsx.comm.links.link import Link
from dsx.core.membership import Seat
from dsx.core.transport import PeerLost
from dsx.core.types import Stage

_LET_GO_SECONDS = 30.0  # TCP gives an unanswered connection up before, and what lies in it


class LinkTransport(GlooTransport):
    """Averages between this rank and those with its number, which its link has connections to.

    `name` is the transport's, the same in all clusters and used once.
    """

    def __init__(
        self,
        link: Link,
        name: str,
        fragments: Sequence[int],
        seat: Seat,
        deadline_seconds: float,
        stage: Stage,
        notes: dist.Store | None = None,
    ) -> None:
        lanes = self._lanes = list[LinkGroup]()
        self._let_go: list[Future[None]] = []  # of each, once it has been closed

        def connect(what: str, streams: int) -> list[LinkGroup]:
            lanes.append(LinkGroup(link, f"{name}/{what}", seat))
            return lanes[-1:]  # the link itself has several streams, which all lanes share

        super().__init__(fragments, connect, seat, deadline_seconds, stage, 1, notes)

    def abort(self) -> None:
        """As over gloo; afterwards no buffer is read, either.

        What a lane has sent may lie in libzmq, on its way to a member that waits for it still: were
        the buffer used for the next attempt, that member would take a mixture for the message.
        """
        super().abort()
        if futures.wait(self._let_go, _LET_GO_SECONDS).not_done:
            raise PeerLost(
                "what was sent under the membership before is not let go within "
                f"{_LET_GO_SECONDS:g} s; resume the run"
            )

    def close(self) -> None:
        """As over gloo; the link stays, its lanes end."""
        super().close()
        self._drop_connections()

    def _drop_connections(self) -> None:
        self._let_go = [lane.close() for lane in self._lanes]
