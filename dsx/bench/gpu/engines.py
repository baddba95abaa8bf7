"""The engines that a check trains a small GPT with: each a few lines, as a script has them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsx
from dsx.bench.gpu.job import Job
from dsx.examples.gpt import GPT, GPTConfig, Layer

SHAPE = GPTConfig(num_layers=4, hidden_size=256, num_heads=4, sequence_length=128, vocab_size=512)
ROWS, RATE = 8, 1e-3


class Trainer(NamedTuple):
    """A model with dsx attached; `step` trains on tokens `[ROWS, length + 1]`; its loss, 0-dim."""

    handle: dsx.Handle
    step: Callable[[Tensor], Tensor]
    parameters: Callable[[], Iterable[Tensor]]
    stateful: Sequence[Any] = ()  # what the script would save itself, by `state_dict`


def tokens_of(cluster: int, rank: int, step: int) -> Tensor:
    """Return a step's tokens, int64: each follows from the one before, but for some noise."""
    generator = torch.Generator().manual_seed(100_000 * cluster + 1000 * rank + step)
    length, words = SHAPE.sequence_length, SHAPE.vocab_size
    noise = torch.randint(words, (ROWS, length + 1), generator=generator)
    is_noise = torch.rand(ROWS, length + 1, generator=generator) < 0.2
    tokens = [noise[:, 0]]
    for place in range(1, length + 1):
        tokens.append(torch.where(is_noise[:, place], noise[:, place], (tokens[-1] + 7) % words))
    return torch.stack(tokens, dim=1)


def build(job: Job, device: torch.device) -> Trainer:
    """Return what trains; dsx.init_distributed has been called. Collective over all ranks."""
    if job.engine.startswith("deepspeed"):
        return _deepspeed(job)
    if job.engine.startswith("megatron"):
        return _megatron(job, device)
    return _torch(job, device)


def _torch(job: Job, device: torch.device) -> Trainer:
    net = GPT(SHAPE, seed=job.cluster).to(device)
    model: nn.Module = net
    if job.engine == "torch_ddp":
        model = nn.parallel.DistributedDataParallel(net)
    elif job.engine == "torch_fsdp2":
        shard(net, device.type)
    optimizer = _optimizer(job.engine, model)
    handle = dsx.attach(model, optimizer, config=job.dsx())
    autocast = functools.partial(torch.autocast, device.type, torch.bfloat16)

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        with autocast():
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Trainer(handle, step, model.parameters, (model, optimizer))


def shard(net: nn.Module, device: str) -> None:
    """Cut a GPT by FSDP2, layer by layer. Collective over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in [module for module in net.modules() if isinstance(module, Layer)]:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)


def _optimizer(engine: str, model: nn.Module) -> torch.optim.Optimizer:
    if engine == "torch_apex":
        apex: Any = importlib.import_module("apex.optimizers")
        return apex.FusedAdam(model.parameters(), lr=RATE)
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)


def _deepspeed(job: Job) -> Trainer:
    stage = int(job.engine[-1])
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": job.device == "cuda"},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        **job.dsx(),
    }
    net = GPT(SHAPE, seed=job.cluster)
    engine: Any = dsx.initialize(model=net, model_parameters=net.parameters(), config=config)[0]

    def step(tokens: Tensor) -> Tensor:
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Trainer(engine.dsx, step, lambda: gathered(engine.module))


def gathered(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters, gathered where ZeRO takes them apart. Collective in the cluster."""
    import deepspeed

    for parameter in module.parameters():
        apart = [parameter] if hasattr(parameter, "ds_id") else []
        with deepspeed.zero.GatheredParameters(apart):
            yield parameter.detach().clone()


def _megatron(job: Job, device: torch.device) -> Trainer:
    from megatron.core import parallel_state, tensor_parallel

    from dsx.bench.gpu.megatron import forward_backward, make

    parallel_state.initialize_model_parallel()
    seed: Any = tensor_parallel.model_parallel_cuda_manual_seed
    seed(1234, force_reset_rng=True)
    torch.manual_seed(job.cluster)
    chunk, optimizer = make(SHAPE, RATE, job.engine == "megatron_distributed", job.device == "cuda")
    handle = dsx.attach_megatron([chunk], optimizer, config=job.dsx())

    def step(tokens: Tensor) -> Tensor:
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        loss = forward_backward(chunk, tokens)
        optimizer.step()
        return loss

    return Trainer(handle, step, chunk.parameters)
