"""What coding loses, made in the place of the values: the bits of a residual with its own fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsx.comm.in_process import InProcessHub
from dsx.compress import averaging
from dsx.compress.averaging import CodedMean
from dsx.compress.error_feedback import Residual
from dsx.compress.wire.formats import FORMATS, Storage
from dsx.core.buffers import Opening, SharedWork
from dsx.core.exchange import Exchange
from dsx.core.membership import Seat
from dsx.core.transport import Submission
from tests.levels import in_turn

NUMEL = 64 * 64 + 40  # the last group is not full
WIRES = {
    "bf16": {}, "int8": {"rounding": "stochastic"}, "int4": {}, "fp8": {}, "fp4_e3m0": {},
    "ternary": {}, "3bit": {}, "2bit": {}, "1bit": {},
}  # fmt: skip


class NoWork(SharedWork):
    """Lends nothing."""

    def taken(self, numel: int) -> Any:
        raise AssertionError(f"{numel} elements were asked for")


def averaged(wire: str, storage: Storage, num_clusters: int, is_in_place: bool) -> list[Any]:
    """Four rounds; the means, and all that is stored then."""
    form: Any = FORMATS[wire]
    up = form(**WIRES[wire])
    seats = [Seat.of(m, num_clusters) for m in range(num_clusters)]
    transports = InProcessHub(seats[0].membership).transports()
    opening = Opening(work=NoWork() if is_in_place else SharedWork())
    means = [CodedMean(NUMEL, up, FORMATS["int8"](), seat, "eager") for seat in seats]
    own = [Residual(NUMEL, storage, 1.0, opening, is_in_place) for _ in seats]
    of_mean: list[Residual | None] = [None] * num_clusters
    if num_clusters > 3:
        lengths = [
            sum(b - a for a, b in (mean._bounds[s] for s in mean._owners[m]))
            for m, mean in enumerate(means)
        ]
        of_mean = [Residual(n, storage, 1.0, opening, is_in_place) for n in lengths]
    generator, found = torch.Generator().manual_seed(0), []
    for round in range(1, 5):
        xs = [torch.randn(NUMEL, generator=generator) for _ in seats]
        for x in xs:
            x[:70] = 0.0 if round == 2 else x[:70]
        exchanges: list[Exchange] = [
            mean.exchange(x, residual, 7 * round, lost, round)
            for mean, x, residual, lost in zip(means, xs, own, of_mean, strict=True)
        ]
        pending = [
            t.submit(Submission(0, round), exchange)
            for t, exchange in zip(transports, exchanges, strict=True)
        ]
        found += [p.wait().clone() for p in pending]
        found += [r.stored.clone() for r in (*own, *of_mean) if r is not None]
    return found


@pytest.mark.parametrize(
    ("wire", "storage"), [*in_turn(WIRES, ["int8", "bf16"]), ("int4", "bf16"), ("2bit", "bf16")]
)
@pytest.mark.parametrize("num_clusters", [1, 2, 5])
def test_is_that_of_a_residual_with_its_own_work_space(
    wire: str, storage: Any, num_clusters: int
) -> None:
    ours = averaged(wire, storage, num_clusters, is_in_place=True)
    theirs = averaged(wire, storage, num_clusters, is_in_place=False)
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
    assert any(t.dtype == torch.uint8 and t.any() for t in ours)


def test_one_in_fp32_or_that_fades_has_its_own() -> None:
    assert not Residual(4, "fp32", 1.0, is_in_place=True).is_in_place
    assert not Residual(4, "int8", 0.9, is_in_place=True).is_in_place
    assert Residual(4, "int8", 1.0, is_in_place=True).is_in_place
    assert not Residual(4, "int8", 1.0).is_in_place


@pytest.mark.parametrize("storage", ["fp32", "bf16", "int8"])
def test_what_is_made_anew_some_at_a_time_is_stored_as_a_whole(storage: Any) -> None:
    """Also where no piece ends with a group."""
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(3))
    whole, found = (Residual(NUMEL, storage, 1.0) for _ in range(2))
    whole.write(values)
    lengths = [100, 1, 700, 255, 256, 2000]
    lengths.append(NUMEL - sum(lengths))
    with found.made_anew(max(lengths)) as anew:
        for piece in values.split(lengths):
            anew.room(piece.numel()).copy_(piece)
    assert torch.equal(found.stored, whole.stored) and found.stored.any()


@pytest.mark.parametrize("num_clusters", [2, 5])
@pytest.mark.parametrize("wire", WIRES)
def test_what_codes_miss_is_the_same_however_much_is_decoded_at_a_time(
    wire: str, num_clusters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    form: Any = FORMATS[wire]
    seat = Seat.of(0, num_clusters)
    mean = CodedMean(NUMEL, form(**WIRES[wire]), FORMATS["int8"](), seat, "eager")
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(4))
    mean.recode(x.clone(), seed=5)
    stored: list[torch.Tensor] = []
    for together in (NUMEL, 700, 1):
        monkeypatch.setattr(averaging, "LOST_TOGETHER", together)
        residual = Residual(NUMEL, "int8", 1.0)
        with residual.made_anew(NUMEL) as anew:
            mean.write_lost(x, anew)
        stored.append(residual.stored)
    assert torch.equal(stored[0], stored[1]) and torch.equal(stored[0], stored[2])
    decoded = torch.empty(NUMEL)
    for data, (start, stop) in zip(mean.messages(0), mean._bounds, strict=True):
        mean._codec.decode(data, decoded[start:stop])
    expected = Residual(NUMEL, "int8", 1.0)
    expected.write(x - decoded)
    assert torch.equal(stored[0], expected.stored)
