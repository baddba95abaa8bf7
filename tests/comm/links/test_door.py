"""Who asks to be let in tells where its ranks are: as many as every cluster of the run has."""

from __future__ import annotations

import pytest

from dsx.comm.links.door import Door, enter
from dsx.comm.links.places import Place, Ranks
from tests.comm.links.clusters import two_links

OWN = Ranks((("here:1", 0, 7), ("here:2", 0, 8)))
PLACES: list[Place] = [("there:1", 0, 9), ("there:2", 0, 10), ("there:3", 0, 11)]


def test_one_with_as_many_ranks_is_let_in_and_no_other() -> None:
    come: list[tuple[int, Ranks]] = []
    with two_links() as (links, _):
        Door(links[0], "run", {}, OWN, lambda: [0], lambda m, ranks: come.append((m, ranks)))
        for count in (0, 1, 3):
            said = f"cluster 0: .* cluster 1 has {count} ranks, and .* has 2; start it with 2"
            with pytest.raises(RuntimeError, match=said):
                enter(links[1], [0], Ranks(tuple(PLACES[:count])), 20.0)
        assert come == []
        same = Ranks(tuple(PLACES[:2]))
        enter(links[1], [0], same, 20.0)
    assert come == [(1, same)]
