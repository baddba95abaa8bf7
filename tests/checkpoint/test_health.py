"""What a manifest says against a checkpoint at the time of its save."""

from __future__ import annotations

import torch

from dsx.checkpoint.health import find_trouble, tensors_of
from tests.checkpoint.test_reshard import new_tiny


def test_what_is_not_finite_is_told() -> None:
    clusters = new_tiny("streaming_diloco")
    loop = clusters.loops[0]
    optimizer = clusters.optimizers[0]
    assert find_trouble(loop, tensors_of([optimizer])) == ""
    parameter = next(iter(clusters.models[0].parameters()))
    with torch.no_grad():
        kept = parameter.clone()
        parameter.view(-1)[-1] = torch.nan
        assert find_trouble(loop, ()) == "the masters at step 0: not finite"
        parameter.copy_(kept)
    loop.state.anchor[1][0] = torch.inf
    assert find_trouble(loop, ()) == "the outer state at step 0: not finite"
    loop.state.anchor[1][0] = 0
    moments = torch.optim.Adam([parameter])
    parameter.grad = torch.full_like(parameter, torch.nan)
    moments.step()
    with torch.no_grad():
        parameter.copy_(kept)
    assert find_trouble(loop, tensors_of([moments])) == (
        "the inner optimizer's state at step 0: not finite"
    )
    assert find_trouble(loop, ()) == ""


class Flattened(torch.Tensor):
    """A tensor of parts, such as a shard on its mesh, or codes with scales."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["local", "mesh"], None


def test_of_tensors_made_of_parts_the_parts_are_looked_at() -> None:
    whole = torch.zeros(2).as_subclass(Flattened)
    whole.local, whole.mesh = torch.tensor([torch.nan]), "the ranks"
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    optimizer.state["any"] = {"moment": whole, "step": 3}
    assert [t.isnan().all() for t in tensors_of([optimizer])] == [True]


def test_rounds_that_are_refused_or_empty_are_told() -> None:
    loop = new_tiny("streaming_diloco").loops[0]
    loop.history.idle[1].count([1], 8)
    assert find_trouble(loop, ()) == "fragment 1: cluster 1 takes no inner steps since step 8"
    loop.history.refusals[0].count([0], 4)
    told = "fragment 0 is refused since step 4: values sent are not finite"
    assert find_trouble(loop, ()) == told
