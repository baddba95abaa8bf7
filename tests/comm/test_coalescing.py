"""Short tensors travel together: the same bytes arrive, in fewer messages."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsx.comm.coalescing import SHORT_BYTES, Incoming, outgoing

KINDS = (torch.float32, torch.uint8, torch.int64)
tensors = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 7, 300, SHORT_BYTES // 4, SHORT_BYTES + 1]), st.sampled_from(KINDS)
    ),
    max_size=7,
)


def filled(numel: int, kind: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 200, (numel,), generator=generator).to(kind)


@given(sizes=tensors)
def test_what_arrives_is_what_was_sent(sizes: list[tuple[int, torch.dtype]]) -> None:
    sent = [filled(numel, kind, seed) for seed, (numel, kind) in enumerate(sizes)]
    received = [torch.zeros_like(t) for t in sent]
    incoming = Incoming(received)
    messages = outgoing(sent)
    assert [m.numel() * m.element_size() for m in messages] == [
        m.numel() * m.element_size() for m in incoming.messages
    ]
    for there, here in zip(messages, incoming.messages, strict=True):
        here.copy_(there)
    incoming.deliver()
    assert all(torch.equal(a, b) for a, b in zip(sent, received, strict=True))


def test_short_ones_are_one_message_and_a_long_one_is_not_copied() -> None:
    long = torch.zeros(SHORT_BYTES)
    messages = outgoing([torch.ones(3), long, torch.ones(5), torch.empty(0)])
    assert [m.numel() * m.element_size() for m in messages] == [32, 4 * SHORT_BYTES]
    assert messages[1] is long


def test_a_single_short_one_is_sent_as_it_is() -> None:
    only = torch.ones(3)
    assert outgoing([only])[0] is only
    received = torch.zeros(3)
    assert Incoming([received]).messages[0] is received
