"""Members that are lost, and kept: until they are reached again, or the log has left them out.

So are those who may become members, as they heal; and by them everybody, as no view has them yet.

What is under way with one waits as it would for a short cut, and goes on where it was. Who has been
left out is given up for good, and told so when it is reached again.
"""

from __future__ import annotations

from collections.abc import Collection

from dsx.comm.links.calls import Calls
from dsx.comm.links.hello import Hello
from dsx.comm.links.peer import Peer

LET_GO = "it has gone on without this process, which has to join again as a new one"
_CALL_SECONDS = 5.0  # between two times that one who is lost is called anew


class Held:
    """Of one link; used by its thread alone, but for `hold`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._epoch = -1
        self._clusters: frozenset[int] = frozenset()
        self._call_at: dict[Peer, float] = {}
        self.has_ended = False  # whether nobody is kept any more, and none has been left out

    def hold(self, clusters: Collection[int], epoch: int) -> None:
        """Keep the ranks of these clusters, the members of a view, and no others; any thread."""
        if epoch >= self._epoch and not self.has_ended:
            self._epoch, self._clusters = epoch, frozenset(clusters)

    def end(self) -> None:
        """Keep nobody any more, as this cluster does not go on; any thread."""
        self.has_ended, self._clusters = True, frozenset()

    @property
    def is_outside(self) -> bool:
        """Whether this cluster heals, and no view has it yet."""
        return self._epoch >= 0 and not self._clusters and not self.has_ended

    def holds(self, peer: Peer) -> bool:
        """Whether a peer is one of a member's ranks, or of one who is none yet."""
        if peer.is_visitor or self.has_ended or self._epoch < 0:
            return False
        self._note_member(peer)
        return peer.cluster_id in self._clusters or not peer.was_member

    def keeps(self, peer: Peer, why: str, now: float) -> bool:
        """Whether a peer is kept that is lost, and why; it is called anew now and then."""
        if not self.holds(peer):
            self._call_at.pop(peer, None)
            return False
        peer.suspected = why
        if now >= self._call_at.get(peer, 0.0):
            self._call_at[peer] = now + _CALL_SECONDS
            self._calls.call_anew(peer)  # with it goes what libzmq has for the old connection
        return True

    def is_let_go(self, peer: Peer | None, hello: Hello, own: int) -> bool:
        """Take that a process of this incarnation has been left out; whether it is by a member.

        Whoever this one has left out itself is of another run, which goes on apart.
        """
        if peer is None or (hello.incarnation, hello.over) != (peer.incarnation, own):
            return False
        if peer.error is not None:
            peer.is_apart = not (self.has_ended or peer.has_let_go)
            return False
        peer.has_let_go = self.holds(peer)
        return peer.has_let_go

    def is_back(self, peer: Peer) -> None:
        """Take a peer that is reached: nothing is suspected."""
        self._note_member(peer)
        if peer.suspected:
            peer.suspected = ""
            self._call_at.pop(peer, None)

    def _note_member(self, peer: Peer) -> None:
        peer.was_member = peer.was_member or peer.cluster_id in self._clusters
