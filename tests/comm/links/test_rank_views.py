"""What ranks have noted of whom they do not reach, as the first rank's board reads it."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from dsx.comm.links.places import Ranks
from dsx.comm.links.rank_views import Board


@pytest.mark.parametrize("newer", [1, 2])
def test_of_two_ranks_notes_that_of_the_newest_process_counts(newer: int) -> None:
    """A cluster has come again; one rank has lost that, the other still tells of the one before."""
    store = dist.HashStore()
    board = Board(store, 3)
    board.let_in(1, Ranks((("there:1", 0, 77),)).pack())
    for rank in (1, 2):
        noted = [1, "it is gone again"] if rank == newer else [0, "it is gone"]
        store.set(f"lost/{rank}", json.dumps({"1": noted}))
    store.add("num_lost", 2)
    assert board.lost() == {1: (77, "it is gone again")}
