"""A save that waits for nobody: what one cluster has got and another not is the same in the end."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dsx.checkpoint.checksums import of_text
from dsx.checkpoint.files import META_CHECKSUM
from dsx.checkpoint.transfers import take_stock
from dsx.compress.low_rank_channel import LowRankChannel
from dsx.config.schema import preset
from dsx.engines import simulated
from dsx.outer.loop import OuterLoop
from dsx.outer.transfer import Transfer
from tests.checkpoint.half_arrived import (
    HoldingHub,
    assert_same,
    catch_up,
    hold,
    lacking,
    resume,
    save_all,
)
from tests.compress.test_over_gloo import WideNet, loss
from tests.simulated import Simulated

NUM_STEPS = 9
CODECS: dict[str, dict[str, Any]] = {
    "dense": {"type": "dense"},
    "bf16": {"type": "quantized", "wire": "bf16"},
    "int8": {"type": "quantized", "wire": "int8"},
    "int4, fp32": {"type": "quantized", "error_feedback": "fp32"},
    "int4, bf16, decay": {
        "type": "quantized", "error_feedback": "bf16", "feedback_decay": 0.9,
    },
    "stochastic int4, int8": {
        "type": "quantized", "rounding": "stochastic", "error_feedback": "int8",
    },
    "low rank": {"type": "low_rank", "rank": 6, "dense_rounds": 1},
    "low rank, cold": {"type": "low_rank", "rank": 6},
    "top-k": {"type": "top_k", "k": 32, "chunk": 1024},
    "random top-k": {"type": "random_top_k", "random_ratio": 0.4, "chunk": 256},
}  # fmt: skip
METHODS: dict[str, tuple[str, dict[str, Any], int]] = {
    "blocking": ("diloco", {"schedule": {"interval": 3}}, 6),
    "one step": ("diloco_delayed", {"schedule": {"interval": 3}}, 7),
    "streaming": (
        "streaming_diloco",
        {
            "schedule": {"interval": 4}, "fragments": {"num_fragments": 2},
            "delay": {"steps": 2, "alpha": 0.3},
        },
        5,
    ),
    "eager": ("eager", {"schedule": {"interval": 3}, "outer_optimizer": {"lr": 0.3}}, 7),
    "eager, two": (
        "eager",
        {
            "schedule": {"interval": 2}, "delay": {"outer_steps": 2},
            "outer_optimizer": {"lr": 0.1},
        },
        7,
    ),
    "adaptive rank": (
        "dilocox",
        {
            "schedule": {"interval": 2}, "fragments": {"num_fragments": 2},
            "control": {
                "rank": 6, "max_rank": 12, "min_interval": 2, "window": 1, "step_seconds": 1.0,
                "round_seconds": 2.0,
            },
            "compression": {"dense_rounds": 1},
        },
        6,
    ),
    "shift, two legs of 2 bits": (
        "streaming_diloco",
        {
            "schedule": {"interval": 4}, "fragments": {"num_fragments": 2},
            "delay": {"type": "shift", "steps": 2},
            "compression": {"type": "quantized", "wire": "2bit", "mean_wire": "2bit"},
        },
        5,
    ),
    "gap, by element": (
        "co2", {"schedule": {"interval": 3}, "staleness": {"granularity": "element"}}, 7
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _holding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "InProcessHub", HoldingHub)


def new_run(name: str, codec: str, num_clusters: int) -> Simulated:
    kind, overrides, _ = METHODS[name]
    given = {} if codec == "own" else {"compression": CODECS[codec]}
    method = preset(kind, num_clusters, **overrides, **given)
    adamw = functools.partial(torch.optim.AdamW, lr=0.01)
    return Simulated(WideNet(), lambda m: adamw(m.parameters()), method, num_clusters)


@functools.cache
def whole_run(name: str, codec: str, num_clusters: int) -> Simulated:
    run = new_run(name, codec, num_clusters)
    for _ in range(NUM_STEPS):
        run.train_step(loss)
    return run


def stopped(name: str, codec: str, num_clusters: int, held: tuple[int, ...]) -> Simulated:
    """Return a run that is held where something is under way, or waited for."""
    run, stop = new_run(name, codec, num_clusters), METHODS[name][2]
    first_held = stop if name == "blocking" else stop - 1
    for step in range(1, stop + 1):
        if step == first_held:
            hold(run, held)
        run.train_step(loss)
    return run


EAGER = ("eager", "eager, two")
OWN = [name for name, (_, overrides, _) in METHODS.items() if "compression" in overrides]
GRID = [
    *((name, codec) for name in METHODS for codec in CODECS
      if name not in OWN and not (name in EAGER and codec.startswith("low rank"))),
    *((name, "own") for name in OWN),
]  # fmt: skip
QUICK = [
    *(("one step", codec) for codec in CODECS),
    ("blocking", "dense"),
    ("blocking", "int4, fp32"),
    ("streaming", "int4, bf16, decay"),
    ("eager", "int4, fp32"),
    ("eager, two", "top-k"),
    ("adaptive rank", "own"),
    ("gap, by element", "dense"),
]


PLACES = [(2, (1,)), (2, (0, 1)), (4, (2,)), (2, (0,)), (3, (0, 2)), (4, (0, 1, 2, 3))]
BY_DEFAULT = {  # one cluster has nothing, of every codec; nobody has it, and owners of means
    *((case, PLACES[0]) for case in QUICK),
    *((("one step", codec), PLACES[1]) for codec in ("int4, fp32", "low rank", "top-k")),
    (("eager", "int4, fp32"), PLACES[1]),
    (("one step", "int4, fp32"), PLACES[2]),
    (("eager", "int4, fp32"), PLACES[2]),
    (("shift, two legs of 2 bits", "own"), PLACES[2]),
}


def level(case: tuple[str, str], place: tuple[int, tuple[int, ...]]) -> Any:
    """Return the mark of a run: none, ci, or slow for a rarer place of a case that is not quick."""
    if (case, place) in BY_DEFAULT:
        return ()
    return pytest.mark.ci if case in QUICK or place in PLACES[:3] else pytest.mark.slow


RUNS = [pytest.param(*case, *place, marks=level(case, place)) for case in GRID for place in PLACES]


@pytest.mark.parametrize(("name", "codec", "num_clusters", "held"), RUNS)
def test_a_resumed_run_is_the_one_that_was_not_disturbed(
    name: str, codec: str, num_clusters: int, held: tuple[int, ...], tmp_path: Path
) -> None:
    """Whoever had got the mean hands it over, or all average once more."""
    first, second = stopped(name, codec, num_clusters, held), new_run(name, codec, num_clusters)
    found = lacking(first)
    assert [bool(indices) for indices in found] == [m in held for m in range(num_clusters)]
    save_all(first, tmp_path, keeps_last=name == "blocking")  # whoever had it has applied it
    resume(second, first, tmp_path)
    catch_up(second, loss)
    while second.num_steps < NUM_STEPS:
        second.train_step(loss)
    assert_same(second, whole_run(name, codec, num_clusters))


def as_gathered(path: Path) -> int:
    """Write a file with vectors' codes in one message; return how many messages went into one."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        meta = file.metadata()
    cut = sorted(name for name in tensors if name.startswith("in_flight.code.small."))
    for key in {name.rpartition("/")[2] for name in cut}:
        parts = [name for name in cut if name.endswith(f"/{key}")]
        tensors[f"in_flight.code.small.0/{key}"] = torch.cat([tensors.pop(name) for name in parts])
    save_file(tensors, path, meta)
    path.with_name(f"{path.name}.sha256").unlink()
    return len(cut)


def test_codes_of_before_vectors_had_owners_are_gone_on_with(tmp_path: Path) -> None:
    """They were one message, which all gathered; the casts are the same."""
    case = ("eager", "int4, fp32", 4)
    first, second = stopped(*case, held=(2,)), new_run(*case)
    save_all(first, tmp_path)
    assert all(as_gathered(path) >= 4 for path in sorted(tmp_path.glob("*/dsx_rank_*.safetensors")))
    resume(second, first, tmp_path)
    catch_up(second, loss)
    while second.num_steps < NUM_STEPS:
        second.train_step(loss)
    assert_same(second, whole_run(*case))


def as_not_settled(path: Path, loop: OuterLoop) -> int:
    """Write a file as of before contributions took in what was lost; return how many there are."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        meta = json.loads(file.metadata()["dsx"])
    tensors = {name: t for name, t in tensors.items() if not name.startswith("probes.")}
    settled = 0
    for index, entry in enumerate(meta["in_flight"]):
        del entry["square"]
        if entry.pop("is_settled"):
            settled += 1
            channel: Any = loop.state.channels[entry["fragment"]].codec
            contribution, slots = channel.as_it_was
            assert not torch.equal(contribution, tensors[f"in_flight.sent/{index}"])
            tensors[f"in_flight.sent/{index}"] = contribution
            for name, slot in slots.items():
                tensors[f"before.codec.{name}/{entry['fragment']}"] = slot
    text = json.dumps(meta)
    save_file(tensors, path, {"dsx": text, META_CHECKSUM: of_text(text)})
    path.with_name(f"{path.name}.sha256").unlink()
    return settled


@pytest.mark.parametrize("name", ["one step", "adaptive rank"])
def test_contributions_beside_what_was_lost_before_are_gone_on_with(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of before dsx added them up once they had been averaged."""

    def settle(self: Any, x: torch.Tensor, launch: Any) -> None:
        self.as_it_was = x.clone(), {name: self.slots[name].clone() for name in self.settled}
        own_settle(self, x, launch)

    own_settle = LowRankChannel.settle
    monkeypatch.setattr(LowRankChannel, "settle", settle)
    case = (name, "low rank" if name == "one step" else "own", 2)
    first, second = stopped(*case, held=(1,)), new_run(*case)
    save_all(first, tmp_path)
    paths = sorted(tmp_path.glob("*/dsx_rank_*.safetensors"))
    counts = [as_not_settled(p, loop) for p, loop in zip(paths, first.loops, strict=True)]
    assert counts[0] > 0 and not counts[1]  # the other one lacks the mean
    resume(second, first, tmp_path)
    catch_up(second, loss)
    while second.num_steps < NUM_STEPS:
        second.train_step(loss)
    assert_same(second, whole_run(*case))


@pytest.mark.parametrize("held", [(1,), (0, 1)])
def test_what_an_exchange_may_end_while_it_is_written_is_copied(held: tuple[int, ...]) -> None:
    """What is under way goes on meanwhile, and what it has sent changes at its end."""
    run = stopped("one step", "low rank", 2, held)
    for cluster, loop in enumerate(run.loops):
        with take_stock(loop) as stock:
            state = [stock.state(fragment.id) for fragment in loop.adapter.fragments]
            tensors = dict[str, torch.Tensor]()
            stock.describe(tensors, keeps_last=True)
        under_way = [t for t in loop.in_flight if isinstance(t, Transfer)]
        assert under_way
        for index, transfer in enumerate(loop.in_flight):
            if not isinstance(transfer, Transfer):
                continue
            named, saved = state[transfer.fragment], tensors[f"in_flight.sent/{index}"]
            settled = loop.state.channels[transfer.fragment].before.settled
            assert settled and all(torch.equal(named[n], slot) for n, slot in settled.items())
            assert torch.equal(saved, transfer.buffers.sent)
            goes_on = cluster in held
            assert goes_on == (not transfer.pending.has_arrived)
            assert (saved is not transfer.buffers.sent) == goes_on
            assert all((named[n] is not slot) == goes_on for n, slot in settled.items())
