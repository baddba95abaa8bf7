"""What a rank knows of clusters that go and come: who trains, and who asks to be let in."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dsx.comm.links.clerk import Clerk
from dsx.comm.links.door import RECORDS, Door, meet_rank, packed_records
from dsx.comm.links.link import Link
from dsx.comm.links.meeting import Met
from dsx.comm.links.places import Ranks
from dsx.comm.links.rank_views import Board, FirstRankViews, OtherRankViews
from dsx.comm.meet import hello_of
from dsx.comm.rendezvous import Rendezvous
from dsx.comm.topology import RankInfo
from dsx.comm.views import Views
from dsx.core.transport import PeerLost
from dsx.core.waits import waiting_for

if TYPE_CHECKING:
    from dsx.comm.joining import RendezvousConfig

_LOOK_SECONDS = 0.05


class Coming:
    """One rank's part, the same for all of its transports; the first rank has clerk and door."""

    def __init__(
        self,
        link: Link,
        config: RendezvousConfig,
        rank_info: RankInfo,
        rendezvous: Rendezvous,
        connect_own: Callable[[str], Any],
        met: Met,
        joins: bool,
    ) -> None:
        """`connect_own` makes a key space of the cluster, over a connection of its own.

        `joins`: a run goes on, which this cluster is to be taken into.
        """
        self._link, self._config, self._rank_info = link, config, rank_info
        self._rendezvous, self._connect_own, self._joins = rendezvous, connect_own, joins
        self._met = met
        self._board: Board | None = None
        self.clerk: Clerk | None = None  # of the first rank
        link.serve(self._tell_records, RECORDS)

    def views(self, processes: dict[int, int]) -> Views:
        """Return what tells who the members are, for one more transport.

        `processes` are the first ranks' of all clusters, as far as they are known, by cluster.
        """
        self._link.hold(() if self._joins else processes.keys(), 0)
        if self._rank_info.rank != 0:
            members = () if self._joins else tuple(processes)
            views = self._connect_own("views")
            return OtherRankViews(views, self._link, members, self._expect)
        if self._board is None:
            count, num_ranks = self._rank_info.num_clusters, self._rank_info.world_size
            store = self._connect_own("views") if num_ranks > 1 else None
            self._board = board = Board(store, num_ranks)
            settings = self._config.link
            assert settings is not None
            self.clerk = Clerk(
                self._link, dict.fromkeys(range(count), 0) | processes, settings.arbiter_id,
                settings.suspect_seconds, board.tell, board.lost, self._joins,
            )  # fmt: skip
            atexit.register(self.clerk.close)  # before the link, which is registered earlier
            self._open_door(self.clerk, board)
        return FirstRankViews(self._board, self._link)

    def finish(self) -> None:
        """This cluster has done its work."""
        if self.clerk is not None:
            self.clerk.finish()

    def wait_for_members(self) -> list[int]:
        """Return who trains, of a run that this cluster joins, once its log says so; on rank 0."""
        seconds, clerk = self._config.deadline_seconds, self.clerk
        assert clerk is not None
        until = time.monotonic() + seconds
        with waiting_for("a run's log to take this cluster's request", seconds):
            while time.monotonic() < until:
                if clerk.contributors is not None:
                    return [*clerk.contributors]
                time.sleep(_LOOK_SECONDS)
        raise PeerLost(
            f"cluster {self._rank_info.cluster_id} has asked to join the run that goes on, and "
            f"nobody has answered within {seconds:g} s (clusters.deadline_seconds)"
        )

    def ask_for_view(self) -> None:
        """Say that this cluster, which joins, can be taken in."""
        if self.clerk is not None:
            self.clerk.ready()

    def _open_door(self, clerk: Clerk, board: Board) -> None:
        """Let clusters in that are started again, from now on."""
        own = self._met.own
        assert own is not None  # this is the first rank

        def come(cluster: int, ranks: Ranks) -> None:
            places = ranks.pack()
            board.let_in(cluster, places)
            self._expect(cluster, places)

        hello = hello_of(self._rank_info, self._config.may_differ)
        Door(self._link, self._rendezvous.session, hello, own, lambda: clerk.trains, come)

    def _expect(self, cluster: int, places: str) -> None:
        """Expect the rank of this one's number of a cluster that has been started again."""
        place = Ranks.unpack(places).places[self._link.rank]
        meet_rank(self._link, cluster, place, self._met.address)

    def _tell_records(self, asker: Any, body: bytes, answer: Callable[[bytes], object]) -> None:
        answer(packed_records(self._rendezvous.records))
