"""What is done about a transfer whose headers told of a NaN, or of a mean decoded differently.

A cluster whose values are not finite has lost its progress and goes on from the anchors. Where
that does not help (say, its inner optimizer's moments are not finite either), all clusters stop
after some rounds, rather than train on without it unnoticed; at once, where there is no anchor. So
they do where a cluster skips all its inner steps, round after round: it has nothing to send.

Where clusters hold different models, more than half decide: the others take the outer state of the
fragment from the first of them, in fp32, and go on from its anchor. That round is left out by all,
and so are those under way, which a wrong anchor may have gone into. Without a majority, or without
an anchor to take, the configuration says what is done. All of it follows from the headers and
from the step, so every rank of every cluster does the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from dsx.core.engine import EngineAdapter
from dsx.core.progress import Progress
from dsx.core.transport import PeerLost, Transport
from dsx.core.types import History, RoundsInARow
from dsx.method.method import Method
from dsx.outer.bit_hash import BitHash
from dsx.outer.guard import forget
from dsx.outer.notices import NoticeCarrier, places_in
from dsx.outer.parity_check import MEAN, ParityResult, Sides
from dsx.outer.state import StateStore
from dsx.outer.transfer import NothingYet, Transfer

MOST_REFUSALS = 3  # of one fragment in a row, and one for each round that is under way
logger = logging.getLogger(__name__)


class ParityError(RuntimeError):
    """Clusters have applied different means, and the configuration says to stop."""


class NonFiniteError(RuntimeError):
    """A cluster's values, or all its gradients, stay not finite: its training has diverged."""


class Recovery:
    """Acts on the parity results of one rank's transfers, as every rank of every cluster does."""

    def __init__(
        self,
        method: Method,
        adapter: EngineAdapter,
        transport: Transport,
        state: StateStore,
        notices: NoticeCarrier,
    ) -> None:
        self._method = method
        self._adapter = adapter
        self._transport = transport
        self._state = state
        self._notices = notices
        self._hash_buffers = state.allocator.buffers("work_space")
        self._hash = BitHash(self._hash_buffers)
        transport.offer(self.shared_state)
        # masters or anchors are about to be replaced; what is launched of them is still to be made
        self.before_restart: Callable[[], object] = lambda: None

    def hash_anchor(self, fragment: int, launches: int | None = None) -> Tensor | int:
        """Return the hash of an anchor, 0 if after so many launches it is not its turn.

        Fragments take turns, so that not all are hashed at one boundary.
        """
        every = self._method.anchor_check_interval
        if not every or not self._has_anchor or not self._state.is_sent(fragment):
            return 0
        if launches is not None and (launches + fragment) % every:
            return 0
        return self._hash.of(self._state.anchor[fragment])

    def act_on(
        self,
        fragment: int,
        launched: int,
        parity: ParityResult,
        history: History,
        is_comparison: bool = False,
        notes: Mapping[int, bytes] = MappingProxyType({}),
    ) -> None:
        """Agree in the cluster on a transfer's result, in place; repair or stop if means differ.

        Collective over the cluster's ranks: one may own nothing of the fragment, or see in its
        shard what the others do not. NonFiniteError after too many refusals in a row. `notes` have
        come beside it (notices.py).
        """
        what = f"{self._adapter.stage.name_of(fragment)} launched at step {launched}"
        try:
            kinds = self._agree(parity, notes)
        except PeerLost as error:  # a rank of this cluster
            raise PeerLost(f"{what}: {error}") from error
        refusals = history.refusals[fragment]
        refusals.count(parity.refused_by or parity.uncommitted, launched)
        if parity.refused_by:
            self._refuse(what, parity, refusals)
        elif parity.uncommitted:
            self._leave_out(what, parity.uncommitted, refusals)
        is_from_before = not is_comparison and launched <= history.mended[fragment]
        if is_from_before:
            parity.differing = []
        elif kinds and self._mends(fragment, parity, kinds, what):
            history.mended[fragment] = history.step
            if self._method.guards:
                forget(fragment, history)
        is_refused_by_any = bool(parity.refused_by or parity.uncommitted or kinds)
        parity.is_refused = parity.is_refused or is_refused_by_any or is_from_before

    def _agree(
        self, parity: ParityResult, notes: Mapping[int, bytes]
    ) -> dict[tuple[int, int], int]:
        """Make a result the whole cluster's, in place; return which clusters differ, and in what.

        Two clusters hold the same where all shards do. Shards may have been averaged by other
        members, where one was lost meanwhile: so there is a place for each that may ever be one.
        """
        seat = self._transport.seat
        ids = seat.membership.places
        place = {id: position for position, id in enumerate(ids)}
        rows, end = self._notices.places.rows(ids, places_in(notes)), 7 + len(ids)
        flags = torch.zeros(end + len(rows), len(ids), dtype=torch.float64)
        if rows:
            flags[end:] = torch.tensor(rows, dtype=torch.float64)
        named = (parity.refused_by, parity.idle_in, parity.uncommitted, parity.too_large)
        for row, clusters in enumerate(named):
            flags[row, [place[id] for id in clusters]] = 1
        flags[4], flags[5] = parity.round, self._notices.hear(notes)
        flags[6, [place[id] for id in parity.ids]] = 1
        for a, b, kind in parity.apart:
            flags[7 + place[a], place[b]] = kind
        own = torch.tensor(parity.sums, dtype=torch.float64)
        flags, sums = self._adapter.ranks.max_and_sum(flags, own)
        parity.sums = sums.tolist()
        if flags[5, 0]:
            self._notices.agree()
        self._notices.places.agree(flags[end:].tolist())
        parity.refused_by, parity.idle_in, parity.uncommitted, parity.too_large = (
            [id for id, flag in zip(ids, row, strict=True) if flag] for row in flags[:4].tolist()
        )
        parity.round = int(flags[4, 0])
        kinds = {
            (ids[a], ids[b]): int(flags[7 + a, b]) for a, b in torch.nonzero(flags[7:end]).tolist()
        }
        averaged = [id for id, flag in zip(ids, flags[6].tolist(), strict=True) if flag]
        parity.ids = averaged or [*seat.ids]  # no rank of this cluster sends anything of it
        parity.differing = Sides.of(parity.ids, kinds, parity.refused_by).wrong
        return kinds

    def count_idle(self, transfer: Transfer, history: History) -> None:
        """Warn of clusters that took no inner step in a round; stop after too many such rounds.

        After `act_on`, which has agreed on whose they are; NonFiniteError on every rank alike.
        """
        idle, limit = history.idle[transfer.fragment], self._method.idle_rounds_allowed
        idle.count(transfer.buffers.parity.idle_in, transfer.launched - transfer.interval)
        skipped = transfer.launched - idle.since
        who = f"{_names(idle.because_of)} took none of the last {skipped} inner steps, since step"
        what = f"{self._adapter.stage.name_of(transfer.fragment)}: {who} {idle.since}"
        if limit and idle.in_a_row >= limit:
            raise NonFiniteError(
                f"{what}, and so has nothing to send, for {idle.in_a_row} rounds in a row "
                f"(clusters.max_idle_rounds allows less than {limit}): the optimizer skips a step "
                "whose gradients are not finite; resume from a checkpoint of before that step, "
                "with a lower learning rate or other data"
            )
        if idle.in_a_row == 1:
            logger.warning(
                "%s, and so sends nothing new: its optimizer skipped all of them, as it does where "
                "gradients are not finite%s", what,
                f"; all clusters stop after {limit} such rounds in a row" if limit else "",
            )  # fmt: skip

    def restarts(self, transfer: Transfer | NothingYet) -> Sequence[int]:
        """Return the fragments in which this cluster goes on from the anchor: all, one or none.

        All, if its progress is not finite; one that was not what the others hold.
        """
        if not self._has_anchor or isinstance(transfer, NothingYet):
            return []
        own, parity = self._transport.seat.cluster_id, transfer.buffers.parity
        if own in parity.refused_by:
            return range(len(self._adapter.fragments))
        return [transfer.fragment] if own in parity.differing else []

    def restart(self, fragments: Sequence[int], under_way: Sequence[Transfer]) -> None:
        """Go on from the anchors: this cluster's progress is lost, and what its next comes from.

        What is kept of transfers under way is of the path that ends here: the new one starts with
        no progress of its own.
        """
        state, keeps = self._state, self._method.delay.keeps
        self.before_restart()
        for fragment in fragments:
            anchor, slots = state.anchor[fragment], state.slots[fragment]
            self._method.delay.begin(anchor, slots.delay)
            for sizes in slots.staleness.values():
                sizes.nan_to_num_(0.0, 0.0, 0.0)  # of a first step that was not finite
            self._adapter.write(fragment, anchor)
        for transfer in under_way:
            kept = transfer.buffers.kept
            if kept is not None and transfer.fragment in fragments and keeps == "local":
                kept.copy_(state.anchor[transfer.fragment])

    @property
    def _has_anchor(self) -> bool:
        return self._method.outer_optimizer.keeps_anchor

    def _refuse(self, what: str, parity: ParityResult, refusals: RoundsInARow) -> None:
        """Tell of a refusal; NonFiniteError where the cluster is not going to recover."""
        too_large = parity.too_large
        not_finite = [id for id in parity.refused_by if id not in too_large]
        said = [f"{_names(not_finite)} sent values that are not finite"] if not_finite else []
        if too_large:
            said.append(
                f"{_names(too_large)} sent values of more than {self._method.max_norm_ratio:g} "
                "times the norm of the others' (clusters.max_norm_ratio)"
            )
        what = f"{what}: {', and '.join(said)}"
        if not self._has_anchor:
            raise NonFiniteError(
                f"{what}, and there is no anchor to go on from; resume from a checkpoint, with a "
                "lower learning rate or other data there"
            )
        if refusals.in_a_row >= MOST_REFUSALS + self._method.delay.rounds_under_way:
            raise NonFiniteError(
                f"{what}, and {refusals.in_a_row} rounds in a row have been left out: training has "
                f"diverged there; resume from a checkpoint of before step {refusals.since}, with a "
                "lower learning rate or other data"
            )
        logger.error("%s; all clusters leave this round out", what)

    def _leave_out(self, what: str, differing: list[int], refusals: RoundsInARow) -> None:
        """Tell of a round that did not come to be; ParityError where that does not end."""
        what = (
            f"{what}: {_names(differing)} came to another result than the others, each time that "
            "it was averaged"
        )
        if refusals.in_a_row >= MOST_REFUSALS + self._method.delay.rounds_under_way:
            raise ParityError(
                f"{what}, and so it was {refusals.in_a_row} rounds in a row: a machine there, or "
                "the way to it, changes bytes; test its memory and its network cards, and resume "
                "from the last checkpoint"
            )
        logger.error("%s; nobody applies it, and all clusters leave this round out", what)

    def _mends(
        self,
        fragment: int,
        parity: ParityResult,
        kinds: Mapping[tuple[int, int], int],
        what: str,
    ) -> bool:
        """Let those that are wrong take what the others hold, or end the run; True if they did."""
        ids, members = parity.ids, self._transport.seat.ids
        sides = Sides.of(ids, kinds, parity.refused_by)
        giver = next((id for id in sides.right if id not in parity.refused_by), sides.right[0])
        did = f"has applied another mean than cluster {giver} in round {parity.round}"
        if MEAN not in kinds.values():
            did = f"holds another anchor than cluster {giver} after round {parity.round}"
        message = f"{what}: {_names(sides.wrong)} {did}"
        agree = f"{len(sides.right)} of {len(ids)} agree"
        is_decided = sides.is_majority and self._has_anchor
        if not is_decided and self._method.on_mismatch == "stop":
            why = agree if self._has_anchor else "there is no anchor to go on from"
            raise ParityError(f"{message}; {why} (on_mismatch is 'stop'); resume from a checkpoint")
        if not self._has_anchor:
            logger.error("%s; the next mean, or the exported one, brings them together", message)
            return False
        logger.error(
            "%s; %s: taking cluster %d's outer state of the fragment, and leaving out this round "
            "and those under way", message, agree, giver,
        )  # fmt: skip
        self._repair(fragment, [members.index(id) for id in (giver, *sides.wrong)])
        return True

    def _repair(self, fragment: int, chain: Sequence[int]) -> None:
        """Take the outer state of a fragment, in fp32, of the first in `chain`; positions."""
        shared = self._shared_slots(fragment)
        self.before_restart()
        self._state.before_write(fragment)
        if self._state.is_sent(fragment):
            tensors = self.shared_state(fragment)
            what = f"outer state of {self._adapter.stage.name_of(fragment)}, of this rank"
            is_told = self._transport.seat.position in chain and not self._adapter.ranks.shard[0]
            progress = Progress(what, 4 * sum(tensor.numel() for tensor in tensors), is_told)
            for index, tensor in enumerate(tensors):
                if tensor.numel():
                    sent = tensor.float()  # a copy only of what is kept in less
                    self._transport.spread(fragment, sent, chain, progress.moved, index)
                    if sent is not tensor:
                        tensor.copy_(sent)
        else:
            for tensor in shared:
                tensor.fill_(-torch.inf)  # what the cluster's other ranks have taken
        for tensor in shared:
            tensor.copy_(self._adapter.ranks.max_over_ranks(tensor.to("cpu", copy=True)))

    def shared_state(self, fragment: int) -> Sequence[Tensor]:
        """Return what is the same on all clusters."""
        slots = self._state.slots[fragment]
        shared = self._shared_slots(fragment)
        return self._state.anchor[fragment], *slots.outer.values(), *shared

    def _shared_slots(self, fragment: int) -> Sequence[Tensor]:
        slots = self._state.slots[fragment].staleness
        return [slots[name] for name in self._method.staleness.shared_slots]


def _names(clusters: list[int]) -> str:
    return ", ".join(f"cluster {m}" for m in clusters)
