"""CocktailSGD's codes against plain torch: who is picked, what a message holds, both residuals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsx.compress.random_top_k import PickedFormat, RandomTopK
from dsx.compress.random_top_k_channel import Picked
from dsx.compress.wire.formats import FORMATS
from dsx.config.schema import ConfigError, preset
from dsx.core.buffers import Buffers
from tests.compress.channels import Clusters, fragment_of
from tests.levels import by_default

CPU = torch.device("cpu")
FRAGMENT = fragment_of((50, 41), (40,), (64, 32), (30, 40), (3, 5))
RUNS = [(0, 2050), (2090, 5338)]
METHOD: dict[str, Any] = {"random_ratio": 0.3, "top_k_ratio": 0.2, "chunk": 64, "group_size": 32}


def values(numel: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * 10 ** torch.randn(numel, generator=generator)


def picked(numel: int, count: int, seed: int, round: int) -> Tensor:
    choice = Picked(numel, count, Buffers(), Buffers())
    choice.choose(seed, round)
    return choice.positions


def int4(x: Tensor, group: int) -> Tensor:
    """Groups with one scale, the largest over 7, rounded up to bf16."""
    out = x.clone()
    for own in out.split(group):
        scale = (own.abs().max() / 7).bfloat16()
        if scale.float() * 7 < own.abs().max():
            scale = torch.nextafter(scale, torch.tensor(torch.inf).bfloat16())
        own.copy_((own / scale.float() + 0.5).floor() * scale.float() if scale else own * 0)
    return out


def decoded(x: Tensor, ratio: float, chunk: int, group: int) -> Tensor:
    """The largest of every chunk, those together in int4, zeros between them."""
    kept: list[Tensor] = []
    for start, own in zip(range(0, len(x), chunk), x.split(chunk), strict=True):
        count = max(1, int(ratio * len(own)))
        kept.append(own.abs().topk(count).indices.sort().values + start)
    places, out = torch.cat(kept), torch.zeros_like(x)
    out[places] = int4(x[places], group)
    return out


@given(
    numel=st.integers(1, 500),
    chunk=st.sampled_from([1, 7, 64, 100, 4096]),
    ratio=st.sampled_from([0.01, 0.08, 0.3, 0.9, 1.0]),
    seed=st.integers(0, 99),
)
@example(numel=9000, chunk=4096, ratio=0.08, seed=0)
@example(numel=9000, chunk=4096, ratio=0.5, seed=0)
@settings(max_examples=25)
def test_a_message_holds_the_largest_in_int4(
    numel: int, chunk: int, ratio: float, seed: int
) -> None:
    form, x = PickedFormat(ratio, chunk, 32), values(numel, seed)
    codec, out = form.codec(numel, CPU), torch.full((numel,), 7.0)
    data = torch.zeros(form.num_bytes(numel), dtype=torch.uint8)
    codec.encode(x, data)
    codec.decode(data, out)
    assert torch.equal(out, decoded(x, ratio, chunk, 32))
    codec.decode_add(data, out)
    assert torch.equal(out, 2 * decoded(x, ratio, chunk, 32))
    before = values(numel, seed + 1000)
    coded, lost = x.clone(), before.clone()
    codec.encode_with_feedback(coded, lost, data)
    assert torch.equal(coded, x + before)
    assert torch.equal(lost, coded - decoded(coded, ratio, chunk, 32))


def test_a_message_is_places_and_values() -> None:
    """Twelve bits of each kept one or one of each picked one, whichever takes less."""
    form = PickedFormat(0.08, 4096, 128)
    kept = 327  # of 4096
    assert form.num_bytes(4096) == -(-3 * kept // 2) + -(-kept // 2) + 2 * 3
    assert PickedFormat(0.2, 4096, 128).num_bytes(4096) == 4096 // 8 + -(-819 // 2) + 2 * 7
    # of every element: 0.1 picked, 0.08 of them sent, 16 bits each and scales
    assert 8 * form.num_bytes(409_600) / 4_096_000 == pytest.approx(0.129, abs=1e-3)
    form = PickedFormat(0.5, 4, 32)
    data = torch.zeros(form.num_bytes(4), dtype=torch.uint8)
    form.codec(4, CPU).encode(torch.tensor([0.1, -7.0, 0.2, 7.0]), data)
    assert data.tolist()[:1] == [0b1010] and form.section_bytes(4) == (1, 3)


@pytest.mark.parametrize(
    ("numel", "count"), [(1000, 100), (1007, 100), (17, 17), (300_005, 70_001)]
)
def test_one_of_each_stretch_is_picked(numel: int, count: int) -> None:
    method = RandomTopK(random_ratio=0.1)
    assert method.num_picked(1007) == 100
    positions = picked(numel, count, 3, 1)
    length, longer = divmod(numel, count)
    starts = torch.tensor([0] + [length] * (count - longer) + [length + 1] * longer).cumsum(0)
    assert int(starts[-1]) == numel
    assert bool((positions >= starts[:-1]).all() and (positions < starts[1:]).all())
    assert torch.equal(positions, picked(numel, count, 3, 1))
    if length > 1:
        assert not torch.equal(positions, picked(numel, count, 3, 2))
        assert not torch.equal(positions, picked(numel, count, 4, 1))


def test_every_element_is_picked_as_often() -> None:
    counts = torch.zeros(1000)
    for round in range(1, 2001):
        counts[picked(1000, 100, 5, round)] += 1
    assert counts.sum() == 200_000
    assert (counts - 200).abs().max() < 5 * (200 * 0.9) ** 0.5


@pytest.mark.parametrize("num_clusters", by_default([1, 2, 3, 4, 5], 2, 4))
@pytest.mark.parametrize("feedback", ["fp32", "none"])
def test_both_sides_keep_what_they_lose(feedback: Any, num_clusters: int) -> None:
    """From four clusters on the mean of a slice is coded again, with the owner's own residual."""
    method = RandomTopK(**METHOD, error_feedback=feedback, small_wire="fp32")
    method.validate()
    clusters = Clusters(method, FRAGMENT, num_clusters)
    residuals = [torch.zeros(FRAGMENT.numel) for _ in range(num_clusters)]
    of_means = torch.zeros(FRAGMENT.numel)
    for round in (1, 2, 3, 4):
        xs = [values(FRAGMENT.numel, 10 * round + m) for m in range(num_clusters)]
        mean = clusters.average(xs)
        total = xs[0].clone()
        for x in xs[1:]:
            total += x
        expected = total / num_clusters
        for index, (start, stop) in enumerate(RUNS):
            count = int(0.3 * (stop - start))
            positions = start + picked(stop - start, count, index, round)
            chunks = -(-count // 64)
            owners = num_clusters if num_clusters >= 4 else 1
            cuts = [min(chunks * m // owners * 64, count) for m in range(owners + 1)]
            slices = [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
            total = torch.zeros(count)
            for residual, x in zip(residuals, xs, strict=True):
                own = x[positions] + residual[positions]
                sent = torch.cat([decoded(own[part], 0.2, 64, 32) for part in slices])
                if feedback == "fp32":
                    residual[start:stop] += x[start:stop]
                    residual[positions] = own - sent
                total += sent
            total /= num_clusters
            for part in slices if num_clusters >= 4 else ():
                own = total[part] + of_means[positions[part]]
                total[part] = decoded(own, 0.2, 64, 32)
                of_means[positions[part]] = own - total[part]
            expected[start:stop] = 0
            expected[positions] = total
        assert torch.equal(mean, expected)
        assert clusters.bytes_sent == clusters.payload_bytes(round)
    for channel, residual in zip(clusters.channels, residuals, strict=True):
        for error in channel.errors.values():
            kept = of_means if error.is_of_mean else residual
            assert torch.equal(error.residual.stored, kept[error.start : error.stop])
    held = [sum(4 * slot.numel() for slot in c.slots.values()) for c in clusters.channels]
    assert held == method.state_bytes(FRAGMENT, num_clusters, 0)
    errors = [error for channel in clusters.channels for error in channel.errors.values()]
    of_means_held = sum(error.residual.numel for error in errors if error.is_of_mean)
    assert of_means_held == (5338 - 40 if num_clusters >= 4 else 0)


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_residuals_are_kept_in_less(storage: Any) -> None:
    method = RandomTopK(**METHOD, error_feedback=storage)
    clusters, exact = (Clusters(m, FRAGMENT, 4) for m in (method, RandomTopK(**METHOD)))
    for round in (1, 2, 3):
        xs = [values(FRAGMENT.numel, 10 * round + m).clamp(-3, 3) for m in range(4)]
        ours, theirs = clusters.average(xs), exact.average(xs)
        assert round > 1 or torch.equal(ours, theirs)
    assert 0 < (ours - theirs).norm() < 0.5 * theirs.norm()
    stored = [
        sum(s.numel() * s.element_size() for s in c.slots.values()) for c in clusters.channels
    ]
    assert stored == method.state_bytes(FRAGMENT, 4, 0)
    assert sum(stored) < 0.6 * sum(RandomTopK(**METHOD).state_bytes(FRAGMENT, 4, 0))
    assert FORMATS[storage]().num_bytes(2050) <= min(stored)


def test_all_that_is_picked_and_kept_is_a_mean_in_int4() -> None:
    method = RandomTopK(random_ratio=1.0, top_k_ratio=1.0, group_size=32, small_wire="fp32")
    clusters = Clusters(method, FRAGMENT, 2)
    xs = [values(FRAGMENT.numel, m) for m in range(2)]
    mean = clusters.average(xs)
    for start, stop in RUNS:
        both = [int4(x[start:stop], 32) for x in xs]
        assert torch.equal(mean[start:stop], (both[0] + both[1]) / 2)


def test_a_round_is_picked_from_its_number_alone() -> None:
    """A run that goes on from a checkpoint picks what an undisturbed one does."""
    whole, second = (Clusters(RandomTopK(**METHOD), FRAGMENT, 4) for _ in range(2))
    xs = [[values(FRAGMENT.numel, 10 * round + m) for m in range(4)] for round in range(4)]
    whole.average(xs[0])
    whole.average(xs[1])
    whole.resumed_by(second)
    assert torch.equal(whole.average(xs[2]), second.average(xs[2]))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"random_ratio": 0.0}, r"compression.random_ratio=0.0 must be above 0 and at most 1"),
        ({"top_k_ratio": 1.5}, r"compression.top_k_ratio=1.5 must be above 0 and at most 1"),
        ({"chunk": 8192}, r"compression.chunk=8192 must be at least 1 and at most 4096"),
        ({"group_size": 100}, r"group_size=100 is not known; allowed: 32, 64, 128, 256"),
        ({"error_feedback": "int4"}, r"error_feedback='int4' is not known"),
        ({"error_feedback": "none", "feedback_decay": 0.9}, r"feedback_decay=0.9 has no effect"),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RandomTopK(**fields).validate()


@pytest.mark.parametrize(
    ("name", "codec", "said"),
    [
        ("diloco", {"error_feedback": "none"}, "would lose most of every pseudo-gradient"),
        ("cocktail_sgd", {"error_feedback": "fp32"}, "a residual would send it twice"),
        ("cocktail_sgd", {"type": "top_k"}, "a residual would send it twice"),
        ("cocktail_sgd", {"type": "low_rank", "rank": 4}, "type='low_rank'.*'random_top_k'"),
    ],
)
def test_what_is_not_sent_is_kept_in_one_place(name: str, codec: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        preset(name, compression={"type": "random_top_k"} | codec)
