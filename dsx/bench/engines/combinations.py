"""The engines and layouts that are served and run on a CPU, by the name that --only takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

EngineName = Literal["torch", "deepspeed", "megatron"]


@dataclass(frozen=True)
class Combination:
    """How a cluster trains: `ranks` processes of an engine, in a layout.

    What an engine does not know of stays as it is. `wrap` is of plain PyTorch, `zero_stage` of
    DeepSpeed; the rest is Megatron's, but for `pipeline` and `is_bf16`, which DeepSpeed has, too.
    """

    name: str
    engine: EngineName
    layout: str  # in the table
    ranks: int = 2
    wrap: Literal["none", "ddp", "fsdp2"] = "none"
    zero_stage: int = 0
    is_bf16: bool = False
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1  # virtual stages of a rank
    context: int = 1
    experts: int = 0
    expert_parallel: int = 1
    is_sharded: bool = False  # the distributed optimizer


def _zero(stage: int, is_bf16: bool) -> Combination:
    word = "bf16" if is_bf16 else "fp32"
    name, layout = f"zero{stage}-{word}", f"ZeRO-{stage}, {word}"
    return Combination(name, "deepspeed", layout, zero_stage=stage, is_bf16=is_bf16)


def _megatron(name: str, layout: str, **given: int) -> Combination:
    return Combination(name, "megatron", layout, **given)  # pyright: ignore[reportArgumentType]


COMBINATIONS = {
    one.name: one
    for one in (
        Combination("torch", "torch", "one rank", ranks=1),
        Combination("ddp", "torch", "DistributedDataParallel", wrap="ddp"),
        Combination("fsdp2", "torch", "FSDP2", wrap="fsdp2"),
        *(_zero(stage, is_bf16) for is_bf16 in (False, True) for stage in range(4)),
        Combination("ds-pipeline", "deepspeed", "pipeline of 2", pipeline=2),
        Combination(
            "ds-pipeline-bf16", "deepspeed", "pipeline of 2, ZeRO-1, bf16", pipeline=2,
            zero_stage=1, is_bf16=True,
        ),
        _megatron("dp", "data 2"),
        _megatron("distributed", "data 2, distributed optimizer", is_sharded=True),
        _megatron("distributed-bf16", "the same, bf16", is_sharded=True, is_bf16=True),
        _megatron("tp", "tensor 2", tensor=2),
        _megatron("pp", "pipeline 2", pipeline=2),
        _megatron("vpp", "pipeline 2, virtual 2", pipeline=2, chunks=2),
        _megatron("tp-pp", "tensor 2, pipeline 2", ranks=4, tensor=2, pipeline=2),
        _megatron("cp", "context 2 (a stand-in for the attention)", context=2),
        _megatron("ep", "4 experts over 2 ranks", experts=4, expert_parallel=2),
    )
}  # fmt: skip


def parse(only: str | None) -> Sequence[Combination]:
    """Read names with commas between them, all for None; ValueError for another."""
    if only is None:
        return [*COMBINATIONS.values()]
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in COMBINATIONS:
            raise ValueError(f"--only has {name!r}; it takes {', '.join(COMBINATIONS)}")
    return [COMBINATIONS[name] for name in dict.fromkeys(names)]
