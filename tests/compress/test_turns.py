"""Fragments whose matrices take turns with one work space come to what each comes to alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dsx.compress import owners
from dsx.compress.base import Launch
from dsx.compress.factors import UpCodec
from dsx.compress.low_rank import LowRank
from dsx.compress.low_rank_channel import LowRankChannel
from dsx.compress.owners import rows_added
from dsx.compress.wire.formats import FORMATS
from dsx.core.buffers import Buffers, Opening, Turns
from dsx.core.exchange import Exchange, next_round
from dsx.core.membership import Seat
from tests.compress.channels import correlated, fragment_of
from tests.compress.matrices import plain_low_rank

CLUSTERS = 2
FRAGMENTS = [
    fragment_of((64, 40), (9,), (48, 96), id=0),
    fragment_of((96, 80), (32, 70), id=1),
]


def pass_on(exchanges: Sequence[Exchange]) -> bool:
    """Bring all clusters to their next messages, and those to each other; False at the end."""
    rounds = [next_round(exchange)[0] for exchange in exchanges]
    present = [round for round in rounds if round is not None]
    assert len(present) in (0, len(rounds))
    for sender, sent in enumerate(present):
        for receiver, received in enumerate(present):
            if sender != receiver:
                pairs = zip(sent.outgoing[receiver], received.incoming[sender], strict=True)
                for own, theirs in pairs:
                    theirs.copy_(own)
    return bool(present)


def channels_of(method: LowRank, turns: Turns | None) -> list[list[LowRankChannel]]:
    """By fragment and cluster; with one work space for all, or one for each."""
    seats = [Seat.of(m, CLUSTERS) for m in range(CLUSTERS)]
    return [
        [LowRankChannel(method, fragment, s, 8, Opening(turns=turns or Turns())) for s in seats]
        for fragment in FRAGMENTS
    ]


def trained(channels: list[list[LowRankChannel]]) -> list[Tensor]:
    """Means and state after some rounds, in which messages of fragments come in turn."""
    found: list[Tensor] = []
    for round in range(1, 5):
        launch = Launch(round, 8)
        values = [
            correlated(fragment.numel, CLUSTERS, seed=round + 7 * fragment.id)
            for fragment in FRAGMENTS
        ]
        means = [[x.clone() for x in of_fragment] for of_fragment in values]
        pairs = [
            [c.exchange(x, launch) for c, x in zip(*each, strict=True)]
            for each in zip(channels, means, strict=True)
        ]
        under_way = [True] * len(pairs)
        while any(under_way):
            under_way = [is_on and pass_on(p) for is_on, p in zip(under_way, pairs, strict=True)]
        for of_fragment, own in zip(channels, values, strict=True):
            for channel, x in zip(of_fragment, own, strict=True):
                channel.settle(x, launch)
                found += [slot.clone() for slot in channel.slots.values()]
        found += [mean for of_fragment in means for mean in of_fragment]
    return found


@pytest.mark.parametrize("feedback", ["fp32", "int8"])
def test_what_lies_in_the_work_space_lasts_between_messages_alone(feedback: str) -> None:
    method = plain_low_rank(rank=8, error_feedback=feedback, dense_rounds=1, exclude=("w2",))
    buffers = Buffers()
    turns = Turns(buffers)
    together = trained(channels_of(method, turns))
    alone = trained(channels_of(method, None))
    assert len(together) == len(alone) > 0
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    assert buffers.num_bytes > 0 and not turns.lock.locked()


def test_messages_in_factors_lie_where_those_in_codes_do() -> None:
    """A round has the ones or the others of a matrix; both are worth their whole length."""
    own = Opening()
    fragment = fragment_of((96, 80), (64, 70))
    method = plain_low_rank(rank=8, dense_rounds=1)
    LowRankChannel(method, fragment, Seat.of(0, CLUSTERS), 8, own)
    (told,) = {*method.buffer_bytes(fragment, CLUSTERS, 8)}
    in_codes = method.message_bytes([(0, fragment.numel)], CLUSTERS)[0]
    assert in_codes <= own.buffers.num_bytes <= told


@pytest.mark.parametrize("factor_wire", ["int4", "fp32"])
def test_factors_are_made_in_two_vectors(factor_wire: str) -> None:
    """P and Q, with what each is made of, added up in and scaled in; as long as was said."""
    method = plain_low_rank(rank=8, wire="fp32", factor_wire=factor_wire)
    buffers, told = Buffers(), dict[str, int]()
    trained(channels_of(method, Turns(buffers)))
    for fragment in FRAGMENTS:
        for role, sizes in method.work_in_turn(fragment, CLUSTERS, 8).items():
            told[role] = max(told.get(role, 0), int(max(sizes)))
    found = {role: t.numel() * t.element_size() for (role, _), t in buffers._work.items()}
    assert factor_wire == "int4" or found.keys() == {*"pq"}  # codes take a tile beside them
    assert {role: found[role] for role in "pq"} == {role: told[role] for role in "pq"}


@pytest.mark.parametrize("wire", ["int4", "int8", "fp32"])
@pytest.mark.parametrize("length", [96, 200, 128])
def test_what_others_send_is_added_some_rows_at_a_time(
    wire: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of all at once, also into columns of a factor, wherever a wire lets rows begin."""
    format = FORMATS[wire]()
    rows, x = 300, torch.randn(300, length)
    buffers = Buffers()
    codec = UpCodec(format, rows, length, "eager", buffers, "room")
    data = torch.empty(codec.num_bytes(rows), dtype=torch.uint8)
    codec.encode(x, data, 7)
    whole, start = torch.empty(rows, length), torch.randn(rows, length)
    codec.decode(data, whole)
    step = format.granularity // math.gcd(format.granularity, length)
    monkeypatch.setattr(owners, "ADDED_NUMEL", 3 * step * length)
    assert rows_added(format, rows, length) == 3 * step < rows
    added = start.clone()
    codec.decode_add(data, added)
    assert torch.equal(added, start + whole)
    columns = torch.zeros(rows, length + 9)
    codec.decode(data, columns[:, 4 : 4 + length])
    assert torch.equal(columns[:, 4 : 4 + length], whole)
    assert buffers.work("room", (0,)).untyped_storage().nbytes() == 4 * 3 * step * length
