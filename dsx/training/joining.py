"""A run's clusters come back: each handle gives to one that heals, or heals itself.

Healing takes place where a script first needs the model: in `load_checkpoint`, or before the first
forward. Then the handle stands at the step of the others, and the data where they do.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from dsx.checkpoint.files import SavedRank, rank_file
from dsx.checkpoint.tags import newest_of_own
from dsx.comm.elastic import ElasticTransport
from dsx.comm.world import World
from dsx.config.link import LinkConfig
from dsx.core.transport import PeerLost
from dsx.core.units import format_bytes
from dsx.outer.donor import FIRST, Donor
from dsx.outer.healing import Healing
from dsx.outer.loop import OuterLoop
from dsx.outer.return_refusal import why_not
from dsx.outer.shared_state import saved_names
from dsx.training.dealing import follow_boundaries
from dsx.training.gathering import Gathering
from dsx.training.orders import Orders
from dsx.training.positions import FollowsOthers, Resumable, go_where_others_are, place_here
from dsx.training.records import Records
from dsx.training.saving import Saving

_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
_NOTHING_FROM = "all is taken from the others, and nothing from %s: %s"
logger = logging.getLogger(__name__)


class Joining:
    """One rank's part; does nothing where clusters cannot come back."""

    def __init__(
        self,
        world: World,
        loop: OuterLoop,
        link: LinkConfig,
        saving: Saving,
        gathering: Gathering,
    ) -> None:
        self._world, self._loop, self._saving = world, loop, saving
        rate_mbit = link.heal_rate_mbit
        self._rate_mbit = None if rate_mbit is None else rate_mbit / world.world_size
        self._refuses = why_not(loop.method)
        gathering.require_part = self.require_part
        if world.num_handles > 1:
            self._refuses = "several engines in one process are not served yet"
        self.on_joined: list[Callable[[], object]] = []
        self.healed: Healing | None = None  # how this cluster has come to the others
        self.follows: dict[str, FollowsOthers] = {}  # beside what is tracked for checkpoints
        self.is_due = saving.takes_others = world.joins is not None  # it has yet to heal
        if self.is_due and self._refuses:
            raise ValueError(
                f"a run goes on, which cluster {world.cluster_id} would join: {self._refuses}; end "
                "the others (dsx ctl stop: all save), and start all clusters with the same command"
            )
        self._donor: Donor | None = None
        transport = loop.transport
        if isinstance(transport, ElasticTransport):
            self._transport = transport
            self._donor = donor = Donor(loop, self._refuses, self._places, self._told)
            loop.notices.places.coming = lambda: donor.healing
            loop.notices.places.is_reading = not self.is_due
            follow_boundaries(loop)
            world.serve(self._donor.serve, FIRST)

    def look_in(self, base: str | Path, tag: str | None = None) -> None:
        """Take from the others only what the newest checkpoint of this cluster, or `tag`, lacks."""
        try:
            self._saving.own = newest_of_own(base, self._world.cluster_id, tag)
            why = "" if self._saving.own or tag is None else f"it has no complete {tag!r}"
        except _UNREADABLE as error:  # a join does without
            why = str(error) or type(error).__name__
        if why and self._world.rank == 0:
            logger.warning(_NOTHING_FROM, base, why)

    def follow(self, orders: Orders, changed: Callable[[], object]) -> None:
        """Have `changed` called with what the others have changed, and orders wait for healing."""
        orders.why_not = self.why_no_order
        self.on_joined.append(changed)

    def why_no_order(self) -> str:
        """Say who is healing here, to whom an order for all would come too late; empty if nobody.

        Any thread.
        """
        if self.is_due:
            return "this cluster is healing itself"
        healing = () if self._donor is None else self._donor.healing
        named = ", ".join(map(str, healing))
        return f"cluster {named} is healing: ask again once it is back" if healing else ""

    @property
    def is_before_first_part(self) -> bool:
        """Whether the others do what all do together without this cluster yet."""
        if self._world.joins is None:
            return False
        first = self._transport.first_own
        return first is None or sum(self._loop.history.launches) < first

    def require_part(self, what: str) -> None:
        """Raise PeerLost for what all clusters do together, before this one has its part."""
        if self.is_before_first_part:
            raise PeerLost(
                f"{what}: cluster {self._world.cluster_id} has joined the run of the others, and "
                "has had no part in a transfer yet; all do this together from its first one on: "
                "start this cluster again"
            )

    def heal_if_due(self, records: Records) -> None:
        """Come to where the others are, once. Collective over the ranks of the cluster."""
        if self.is_due:
            self._heal()
            self.is_due = self._saving.takes_others = False
            step, healed = self._loop.history.step, self.healed
            records.begin(step, self._loop.totals)
            if healed is not None:
                records.healed(
                    step, healed.seconds, healed.copied_bytes, healed.held_bytes,
                    healed.results_bytes,
                )  # fmt: skip

    def _heal(self) -> None:
        world, loop, transport = self._world, self._loop, self._transport
        process = world.in_cluster().from_first("which process heals", 1 + secrets.randbits(40))
        loop.notices.places.process = process
        coming, ids, places = world.coming, list[int](), loop.notices.places
        assert coming is not None
        if world.rank == 0:
            ids = coming.wait_for_members()
        ids = world.in_cluster().from_first("who trains", ids)
        healing = Healing(
            loop, world.ask, lambda: ids, lambda: transport.first_own, coming.ask_for_view,
            self._rate_mbit, world.deadline_seconds, world.rank == 0, transport.give_sign,
            lambda: places.may_come, self._held(),
        )  # fmt: skip
        healing.heal()
        self.healed = healing
        for name, one in self._tracked().items():
            if name in healing.places and name not in places:
                go_where_others_are(one, healing.places[name])
        places.begin_reading()
        for call in self.on_joined:
            call()
        if world.rank == 0:
            logger.warning(
                "cluster %d has joined the run at step %d: %s in %.1f s, of this rank%s",
                world.cluster_id, loop.history.step, format_bytes(healing.copied_bytes),
                healing.seconds, self._say_held(healing.held_bytes),
            )  # fmt: skip

    def _held(self) -> Callable[[str], Tensor | None] | None:
        """Return what reads this rank's own checkpoint, by a parcel's names; None without one."""
        own = self._saving.own
        if own is None:
            return None
        try:
            saved = SavedRank(rank_file(own, self._world.rank_info.rank))
        except _UNREADABLE as error:
            logger.warning(_NOTHING_FROM, own, str(error) or type(error).__name__)
            self._saving.own = None
            return None
        names = saved_names(self._loop)

        def read(name: str) -> Tensor | None:
            stored = names.get(name, "")
            try:
                return saved.read(stored) if stored in saved else None
            except (OSError, SafetensorError) as error:
                logger.warning("%s of %s is taken from the others: %s", stored, own, error)
                return None

        return read

    def _say_held(self, num_bytes: int) -> str:
        own = self._saving.own
        return "" if own is None else f"; {format_bytes(num_bytes)} more were in {own}"

    def _tracked(self) -> dict[str, Resumable | FollowsOthers]:
        return {**self._saving.tracked, **self.follows}

    def _places(self) -> str:
        return json.dumps({name: place_here(one) for name, one in self._tracked().items()})

    def _told(self, cluster: int, text: str) -> None:
        if self._world.rank == 0 and text:
            logger.warning("cluster %d is healing: %s", cluster, text)
