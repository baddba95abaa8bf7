"""The thread of a stream beside training: its device, its errors, its end."""

from __future__ import annotations

import threading

import pytest
import torch

from dsx.compress.factor_products import SideProducts
from dsx.core.side_stream import SideStream
from tests.compress.side_streams import CpuStreams, on_the_side


def test_its_thread_is_on_its_device_before_anything_else() -> None:
    """Else it is on the first one, whichever the rank's own is."""
    streams, device = CpuStreams(), torch.device("meta", 3)
    side = SideStream(device, streams)
    thread = side.run(threading.get_ident)
    assert streams.notes[0] == ("on meta:3", thread)
    assert [what for what, _ in streams.notes].count("on meta:3") == 1


def test_an_error_is_raised_where_it_was_asked_for_once_the_device_is_done() -> None:
    """What a call has started may still read and write the host's memory, which is used again."""
    streams = CpuStreams()
    side = SideStream(torch.device("cpu"), streams)
    with pytest.raises(ZeroDivisionError):
        side.run(lambda: 1 // 0)
    assert [what for what, _ in streams.notes[1:]] == ["begin", "record", "wait"]
    assert streams.current is None
    assert side.run(lambda: 7) == 7


def test_its_thread_ends_with_it() -> None:
    """Nothing that it has run keeps it alive, nor what that worked on."""
    before = set(threading.enumerate())
    side = on_the_side()
    products, out = SideProducts(side), torch.empty(4, 8)
    products.of_rows(torch.ones(4, 8), torch.ones(8, 8), out)
    assert torch.equal(out, torch.full((4, 8), 8.0))
    (thread,) = set(threading.enumerate()) - before
    del side, products
    thread.join(5.0)
    assert not thread.is_alive()
