"""A tiny GPT of megatron-core on the CPU, two ranks a cluster; started by the launch tests."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from dsx.bench.megatron_on_cpu import install  # noqa: E402

install()

import dsx  # noqa: E402
from tests.engines.megatrons import Kind, build_inner, train_step  # noqa: E402
from tests.launch.until_stopped import arguments, train  # noqa: E402

LAYOUTS = {
    "pipeline": Kind(pipeline=2, is_tied=True),
    "tensor": Kind(tensor=2, precision="bf16"),
    "sharded": Kind(is_sharded=True, overlaps=True, precision="bf16"),
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layout", choices=LAYOUTS, required=True)


args = arguments(add)
world = dsx.init_distributed(args.deepspeed_config, args)
engine = build_inner(LAYOUTS[args.layout], world.cluster_id)
block = json.loads(Path(args.deepspeed_config).read_text())["dsx"]
handle = dsx.attach_megatron(engine.chunks, engine.optimizer, config={"dsx": block})
train(
    handle, lambda step: train_step(engine, step)[0],
    lambda: (p for chunk in engine.chunks for p in chunk.parameters()), args,
)  # fmt: skip
