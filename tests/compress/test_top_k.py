"""Top-k messages against a naive reading, the algebra of the residual, and a run that trains."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dsx.comm.in_process import InProcessHub
from dsx.compress.base import Channel, Launch
from dsx.compress.top_k import SparseFormat, TopK
from dsx.compress.top_k_channel import RATIO
from dsx.compress.wire.formats import FORMATS
from dsx.config.schema import ConfigError, load_config, preset
from dsx.core.exchange import COMMIT_BYTES, HEADER_BYTES
from dsx.core.membership import Membership, Seat
from dsx.core.transport import Submission
from dsx.core.types import Fragment, Slot
from tests.simulated import Simulated

CPU = torch.device("cpu")


@st.composite
def formats(draw: st.DrawFn) -> SparseFormat:
    chunk = draw(st.sampled_from([1, 2, 7, 64, 100, 4096]))
    return SparseFormat(draw(st.integers(1, min(chunk, 70))), chunk)


def sample(numel: int, seed: int, kind: str = "heavy") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    return {"normal": x, "heavy": x**3, "huge": x * 3e37, "small": x * 1e-20}[kind]


def roundtrip(form: SparseFormat, x: Tensor) -> tuple[Tensor, Tensor]:
    codec = form.codec(x.numel(), CPU)
    data = torch.full((form.num_bytes(x.numel()),), 0xA5, dtype=torch.uint8)
    out = torch.full_like(x, torch.nan)
    codec.encode(x.clone(), data)
    codec.decode(data, out)
    return data, out


def read_message(form: SparseFormat, data: Tensor, numel: int) -> Tensor:
    """Decode a message bit by bit, in Python numbers."""
    kept = [min(form.k, numel - start, form.chunk) for start in range(0, numel, form.chunk)]
    index_bytes, code_bytes, _ = form.section_bytes(numel)
    indices = int.from_bytes(bytes(data[:index_bytes].tolist()), "little")
    codes = int.from_bytes(bytes(data[index_bytes:][:code_bytes].tolist()), "little")
    scales = data[index_bytes + code_bytes :].clone().view(torch.bfloat16).tolist()
    out, entry = torch.zeros(numel), 0
    for chunk, (count, scale) in enumerate(zip(kept, scales, strict=True)):
        for _ in range(count):
            index = indices >> 12 * entry & 0xFFF
            code = codes >> 2 * entry & 3
            out[chunk * form.chunk + index] = [1.0, RATIO, -1.0, -RATIO][code] * scale
            entry += 1
    return out


@given(
    form=formats(),
    numel=st.integers(1, 400),
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(["normal", "heavy", "huge", "small"]),
)
@example(form=SparseFormat(64, 4096), numel=3 * 4096, seed=0, kind="heavy")
@example(form=SparseFormat(64, 4096), numel=4097, seed=1, kind="normal")
@example(form=SparseFormat(63, 4095), numel=2 * 4095 + 5, seed=2, kind="normal")
@settings(max_examples=40)
def test_a_message_holds_the_largest_of_each_chunk(
    form: SparseFormat, numel: int, seed: int, kind: str
) -> None:
    x = sample(numel, seed, kind)
    data, decoded = roundtrip(form, x)
    assert torch.equal(decoded, read_message(form, data, numel))
    for row, own in zip(x.split(form.chunk), decoded.split(form.chunk), strict=True):
        sent = own.nonzero().view(-1)
        sent = sent[row[sent].abs().argsort(descending=True)]
        largest = row.abs().topk(min(form.k, row.numel())).values
        assert torch.equal(row[sent].abs(), largest)
        assert torch.equal(own[sent].sign(), row[sent].sign())
        assert_best(largest.double(), own[sent].abs().double())


def assert_best(magnitudes: Tensor, decoded: Tensor) -> None:
    """Compare with every way to give the first j of descending magnitudes the larger level."""
    errors = []
    for j in range(len(magnitudes) + 1):
        levels = torch.ones_like(magnitudes)
        levels[:j] = RATIO
        scale = magnitudes.dot(levels) / levels.dot(levels)
        errors.append(float((magnitudes - scale * levels).square().sum()))
    energy = float(decoded.square().sum())  # a scale off by 2^-8 adds at most 2^-16 of it
    error = float((magnitudes - decoded).square().sum())
    assert error <= min(errors) + energy * 1.01 * 2.0**-16


@given(form=formats(), numel=st.integers(1, 500), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_decoded_and_residual_are_the_input(form: SparseFormat, numel: int, seed: int) -> None:
    x, before = sample(numel, seed), sample(numel, seed + 1000)
    codec = form.codec(numel, CPU)
    data = torch.zeros(form.num_bytes(numel), dtype=torch.uint8)
    decoded, coded, residual = torch.zeros(numel), x.clone(), before.clone()
    codec.encode_with_feedback(coded, residual, data)
    codec.decode(data, decoded)
    assert torch.equal(coded, x + before)
    assert torch.equal(residual, x + before - decoded)
    assert torch.equal(data, roundtrip(form, x + before)[0])
    twice = decoded.clone()
    codec.decode_add(data, twice)
    assert torch.equal(twice, decoded + decoded)
    total = float((x + before).double().square().sum())
    parts = float(decoded.double().square().sum() + residual.double().square().sum())
    assert parts == pytest.approx(total, rel=2.0**-7)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1.0, 1.0), (-3.4e38, -2.25e38), (2.0**-100, 2.0**-100), (1e-31, 0.0), (1e-45, 0.0), (0, 0)],
)
def test_equal_and_extreme_values(value: float, expected: float) -> None:
    form = SparseFormat(4, 16)
    x = torch.full((40,), float(value))
    data, decoded = roundtrip(form, x)
    assert torch.equal(data, roundtrip(form, x)[0])
    if expected:
        sent = decoded[decoded != 0]
        assert torch.allclose(sent, torch.full((12,), expected), rtol=2.0**-7, atol=0)
    else:
        assert not decoded.any()


def test_messages_have_exact_sizes() -> None:
    form = TopK().format
    assert form.num_bytes(4096) == (64 * (12 + 2) + 16) // 8 == 114
    assert 8 * form.num_bytes(4096 * 1000) / (4096 * 1000) == pytest.approx(0.2227, abs=1e-4)
    assert form.num_bytes(0) == 0
    assert form.num_bytes(1) == 2 + 1 + 2
    assert form.num_bytes(4096 + 3) == 101 + 17 + 4  # 67 entries, 2 chunks
    assert SparseFormat(3, 5).num_bytes(12) == 12 + 2 + 6  # 3 + 3 + 2 entries, 3 chunks


def fragment(*shapes: tuple[int, ...]) -> Fragment:
    layout: list[Slot] = []
    for index, shape in enumerate(shapes):
        layout.append(Slot(f"w{index}", shape, sum(slot.numel for slot in layout)))
    return Fragment(0, 0, tuple(layout))


FRAGMENT = fragment((50, 40), (40,), (64, 32), (30, 40), (3, 5))
RUNS = [(0, 2000), (2040, 5288)]
SMALL = 40 + 15


def average(channels: list[Channel], xs: list[Tensor], round: int) -> tuple[list[Tensor], int]:
    """One exchange of all clusters; the means, and the bytes that cluster 0 sent."""
    pending = [
        transport.submit(Submission(0, round), channel.exchange(x.clone(), Launch(round)))
        for transport, channel, x in zip(
            InProcessHub(Membership.of(len(xs))).transports(), channels, xs, strict=True
        )
    ]
    return [p.wait() for p in pending], pending[0].bytes_sent


@pytest.mark.parametrize("storage", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("num_clusters", [1, 2, 4])
def test_every_cluster_gets_the_mean_of_all_messages(num_clusters: int, storage: Any) -> None:
    method = TopK(k=30, chunk=512, error_feedback=storage, small_wire="fp32")
    method.validate()
    channels = [method.open(FRAGMENT, Seat.of(m, num_clusters), 0) for m in range(num_clusters)]
    residuals = [torch.zeros(FRAGMENT.numel) for _ in range(num_clusters)]
    for round in (1, 2, 3):
        xs = [sample(FRAGMENT.numel, 10 * round + m, "normal") for m in range(num_clusters)]
        means, bytes_sent = average(channels, xs, round)
        assert all(torch.equal(mean, means[0]) for mean in means)
        expected = torch.stack(xs).sum(0) if num_clusters < 3 else xs[0] + xs[1] + xs[2] + xs[3]
        expected /= num_clusters
        for start, stop in RUNS:
            total = torch.zeros(stop - start)
            for m, x in enumerate(xs):
                own = x[start:stop] + method.feedback_decay * residuals[m][start:stop]
                decoded = roundtrip(method.format, own)[1]
                residuals[m][start:stop] = own - decoded
                total += decoded
            expected[start:stop] = total / num_clusters
        if storage == "fp32" or round == 1:
            assert torch.equal(means[0], expected)
        else:
            assert (means[0] - expected).norm() < 0.2 * expected.norm()
        payload = method.payload_bytes(FRAGMENT, num_clusters, Launch(round))[0]
        assert bytes_sent == payload + HEADER_BYTES * (num_clusters - 1)
        sizes = [method.format.num_bytes(stop - start) for start, stop in RUNS]
        own = SMALL // num_clusters  # of four a slice, there and back
        small = (num_clusters - 1) * SMALL if num_clusters < 4 else SMALL - own + 3 * own
        assert payload == (num_clusters - 1) * sum(sizes) + 4 * small
    assert list(channels[0].slots) == ["residual.0", "residual.1"]
    stored = [slot.numel() * slot.element_size() for slot in channels[0].slots.values()]
    sizes = [FORMATS[storage]().num_bytes(stop - start) for start, stop in RUNS]
    assert stored == sizes


def test_what_is_not_sent_decays_and_is_sent_later() -> None:
    method = TopK(k=1, chunk=2048, feedback_decay=0.5)
    channel = method.open(fragment((32, 64)), Seat.of(0, 1), 0)
    x = torch.zeros(2048)
    x[3], x[7] = 4.0, -2.0
    (mean,), _ = average([channel], [x], 1)
    assert mean.nonzero().tolist() == [[3]] and float(mean[3]) == 4.0
    (mean,), _ = average([channel], [torch.zeros(2048)], 2)
    assert mean.nonzero().tolist() == [[7]] and float(mean[7]) == -1.0
    assert not channel.slots["residual.0"].any()
    assert channel.spectrum is None


def test_a_fragment_of_vectors_only_has_no_residual() -> None:
    channel = TopK(small_wire="fp32").open(fragment((40,), (3, 5)), Seat.of(0, 1), 0)
    x = sample(55, 0)
    assert torch.equal(average([channel], [x], 1)[0][0], x)
    assert not channel.slots


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"chunk": 8192}, r"compression.chunk=8192 must be at least 1 and at most 4096.*try 4096"),
        ({"chunk": 0}, r"compression.chunk=0 must be at least 1 and at most 4096"),
        ({"k": 0}, r"compression.k=0 must be at least 1"),
        ({"k": 65, "chunk": 64}, r"compression.k=65 must be at most chunk=64; try 1"),
        ({"bits": 3}, r"compression.bits=3 is not known; allowed: 2"),
        ({"error_feedback": "none"}, r"error_feedback='none' is not known; allowed: 'fp32', 'bf1"),
        ({"small_wire": "int8"}, r"small_wire='int8' is not known; allowed: 'fp32', 'bf16'"),
        ({"feedback_decay": 0.0}, r"feedback_decay=0.0 must be above 0 and at most 1"),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TopK(**fields).validate()


def test_a_config_chooses_it_by_name() -> None:
    block: dict[str, Any] = {"preset": "diloco", "clusters": {"num_clusters": 2}}
    block["compression"] = {"type": "top_k", "k": 32}
    config = load_config(json.loads(json.dumps({"dsx": block})))
    assert config.method.compression == TopK(k=32)
    with pytest.raises(ConfigError, match="did you mean 'chunk'"):
        preset("diloco", compression={"type": "top_k", "chunks": 64})


class Net(nn.Module):
    """Two square layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.14

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](torch.tanh(self.layers[0](x)))


def loss(model: nn.Module, cluster: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100_003 * cluster + step)
    x = torch.randn(32, 48, generator=generator)
    return F.mse_loss(model(x), torch.tanh(2 * x.roll(1, dims=1)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


@pytest.mark.ci
@pytest.mark.parametrize("outer", [{"lr": 0.4, "momentum": 0.5}, {"type": "sgd", "lr": 1.0}])
def test_a_simulated_run_trains_and_keeps_anchors_equal(outer: dict[str, Any]) -> None:
    method = preset(
        "diloco",
        schedule={"interval": 5},
        outer_optimizer=outer,
        compression={"type": "top_k", "k": 64, "chunk": 1024},
    )
    run = Simulated(Net(), adamw, method, num_clusters=3)
    losses = [sum(run.train_step(loss)) / 3]
    for step in range(2, 201):
        losses.append(sum(run.train_step(loss)) / 3)
        if step % 5 == 0:
            first, *others = run.parameters()
            assert all(torch.equal(first[n], other[n]) for other in others for n in first)
    with run.averaged() as model, torch.no_grad():
        final = float(loss(model, 9, 1))
    assert final < 0.5 * losses[0], (losses[::20], final)
    codes, biases = TopK(chunk=1024).format.num_bytes(2 * 48 * 48), 2 * (48 + 48)
    assert run.bytes_sent == [40 * 2 * (codes + biases + HEADER_BYTES + COMMIT_BYTES)] * 3
