"""Where elements lie in a message."""

from __future__ import annotations

import pytest
import torch

from dsx.compress.wire.formats import FORMATS
from dsx.compress.wire.parts import has_places, places_of


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_part_of_a_message_is_that_of_its_elements(name: str) -> None:
    wire = FORMATS[name]()
    one = wire.granularity
    numel = 5 * one + 7
    codec, x = wire.codec(numel, torch.device("cpu"), "eager"), torch.randn(numel)
    whole = torch.empty(wire.num_bytes(numel), dtype=torch.uint8)
    codec.encode(x, whole)
    for start, stop in ((0, one), (one, 4 * one), (4 * one, numel), (0, numel)):
        part = torch.empty(wire.num_bytes(stop - start), dtype=torch.uint8)
        codec.encode(x[start:stop].clone(), part)
        found = torch.cat([whole[place] for place in places_of(wire, numel, start, stop)])
        assert torch.equal(found, part)


class OfOnesOwn:
    """A format whose messages nobody else knows the inside of."""

    name = "mine"

    def num_bytes(self, numel: int) -> int:
        return numel + 3


def test_of_a_format_of_ones_own_only_the_whole_message_is_known() -> None:
    wire = OfOnesOwn()
    assert not has_places(wire)  # type: ignore[arg-type]
    assert places_of(wire, 9, 0, 9) == [slice(0, 12)]  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="of mine is not known"):
        places_of(wire, 9, 0, 4)  # type: ignore[arg-type]
