"""Launches and outer steps part by part: the bits of whole fragments, over all methods."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from dsx.core.types import ParameterShape, SyncView
from dsx.engines.masters import Masters, Piece
from dsx.method.delay.streaming import StreamingMerge
from dsx.method.method import Method
from dsx.method.outer_optimizer import Nesterov, OuterContext
from dsx.outer import work_space
from dsx.outer.parts import Part, joined, parts_of
from dsx.outer.work_space import says
from tests.levels import by_default
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, TinyNet, mean_loss

CPU = torch.device("cpu")
NUM_STEPS = 17


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trained(name: str) -> Simulated:
    run = Simulated(TinyNet(), adamw, ALL_CASES[name].method(2), 2)
    for _ in range(NUM_STEPS):
        run.train_step(mean_loss)
    return run


def whole(method: Method) -> bool:
    return len(list(parts_of(1000, CPU, method, method.outer_optimizer))) == 1


SHORT = ["streaming_diloco", "recommended", "eager", "cocodc", "overlap_local_sgd", "dreamddp"]


@pytest.mark.parametrize("name", by_default(list(ALL_CASES), *SHORT))
def test_parts_give_the_bits_of_whole_fragments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """7 elements at a time: parts begin and end within tensors, and hold several."""
    expected = trained(name)
    monkeypatch.setattr(work_space, "LONGEST", 7)
    found = trained(name)
    for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    for ours, theirs in zip(found.loops, expected.loops, strict=True):
        assert min(ours.history.rounds) >= 1
        lengths = work_space.work_lengths(ours.method, ours.adapter.fragments, False, False)
        used = {purpose: vector.numel() for purpose, vector in ours.state._scratch.items()}
        assert used == {purpose: lengths[purpose] for purpose in used}
        is_whole = ours.method.staleness.is_active or whole(ours.method)
        assert is_whole or not ours.method.outer_optimizer.keeps_anchor or {*used.values()} <= {7}
        for fragment in range(ours.history.num_fragments):
            named = theirs.state.named_state(fragment)
            for key, tensor in ours.state.named_state(fragment).items():
                assert torch.equal(tensor, named[key]), key


def test_which_methods_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those that look at single tensors, or say nothing of themselves."""
    monkeypatch.setattr(work_space, "LONGEST", 7)
    left_whole = {name for name in ALL_CASES if whole(ALL_CASES[name].method(2))}
    measuring = {name for name, case in ALL_CASES.items() if case.method(2).measures_tensors}
    assert measuring <= left_whole
    assert "co2" in left_whole
    assert not left_whole & {*SHORT, "diloco", "diloco_delayed", "dilocox"}


def test_a_policy_made_of_another_is_given_whole_fragments(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it inherits does not tell of what it does itself."""
    monkeypatch.setattr(work_space, "LONGEST", 7)

    class Centred(StreamingMerge):
        def merge(self, view: SyncView) -> Tensor:
            return super().merge(view).sub_(view.anchor.mean())

    class Told(Centred):
        takes_parts = True

    method = ALL_CASES["streaming_diloco"].method(2)
    for kind, is_whole in ((StreamingMerge, False), (Centred, True), (Told, False)):
        changed = copy.copy(method)
        object.__setattr__(changed, "delay", kind(steps=1))
        assert whole(changed) == is_whole


def test_a_rule_made_of_another_is_given_a_mean_of_its_own() -> None:
    class Halved(Nesterov):
        def update(
            self, grad: Tensor, slots: Mapping[str, Tensor], context: OuterContext
        ) -> Tensor:
            return grad.mul_(0.5)  # in place of what has come

    assert says(Nesterov(0.7, 0.9), "leaves_gradient")
    assert not says(Halved(0.7, 0.9), "leaves_gradient")


def test_parts_are_all_of_a_fragment_and_at_least_one() -> None:
    method = ALL_CASES["streaming_diloco"].method(2)
    n = 2 * work_space.LONGEST + 3
    found = [(part.start, part.stop) for part in parts_of(n, CPU, method)]
    assert found == [(0, n - 3 - work_space.LONGEST), (work_space.LONGEST, n - 3), (n - 3, n)]
    assert list(parts_of(0, CPU, method)) == [Part(0, 0)]
    assert list(parts_of(n, torch.device("meta"), method)) == [Part(0, n)]


def test_norms_of_parts_are_the_norm_of_all() -> None:
    x = torch.randn(99, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    reports = [{"x_norm": torch.linalg.vector_norm(x[i : i + 10])} for i in range(0, 99, 10)]
    torch.testing.assert_close(joined(reports)["x_norm"], torch.linalg.vector_norm(x))
    assert joined(reports[:1]) is reports[0]


@functools.cache
def masters() -> tuple[Masters, Mapping[str, Tensor]]:
    """Three tensors in a fragment: 5, none and 9 elements; the last within a longer one."""
    shapes = [ParameterShape(n, s, "float32") for n, s in (("a", (5,)), ("b", (0,)), ("c", (3, 3)))]
    own = {"a": torch.arange(5.0), "b": torch.empty(0), "c": torch.arange(100.0, 120.0)}
    pieces = {"a": Piece(own["a"], (5,)), "b": Piece(own["b"], (0,))}
    pieces["c"] = Piece(own["c"], (3, 3), offset=4)
    return Masters(shapes, [["a", "b", "c"]], pieces), own


def flat(own: Mapping[str, Tensor], found: Masters) -> Tensor:
    values = {"a": own["a"], "b": own["b"], "c": own["c"][4:13]}
    names: Sequence[str] = [slot.name for slot in found.fragments[0].layout]
    return torch.cat([values[name] for name in names])


@pytest.mark.parametrize("start", range(14))
def test_masters_are_read_and_written_from_anywhere(start: int) -> None:
    found, own = masters()
    for stop in range(start, 15):
        before = flat(own, found).clone()
        out = torch.full((stop - start,), -1.0)
        found.read(0, out, start)
        assert torch.equal(out, before[start:stop])
        live = found.in_a_row(0, start, stop)
        assert live is None or torch.equal(live, out)
        found.write(0, out + 1, start)
        expected = before.clone()
        expected[start:stop] += 1
        assert torch.equal(flat(own, found), expected)
        assert live is None or torch.equal(live, out + 1)
    rest = torch.ones(20, dtype=torch.bool)
    rest[4:13] = False
    assert torch.equal(own["c"][rest], torch.arange(100.0, 120.0)[rest])


def test_live_masters_are_those_of_one_tensor() -> None:
    found, own = masters()
    ends = [slot.offset for slot in found.fragments[0].layout] + [14]
    for start in range(14):
        for stop in range(start + 1, 15):
            live = found.in_a_row(0, start, stop)
            is_one = any(a <= start and stop <= b for a, b in zip(ends, ends[1:], strict=False))
            assert (live is not None) == is_one
            assert live is None or live.data_ptr() in range(
                min(t.data_ptr() for t in own.values() if t.numel()),
                max(t.data_ptr() + 4 * t.numel() for t in own.values()),
            )
