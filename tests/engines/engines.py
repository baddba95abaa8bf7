"""DeepSpeed engines of every kind that dsx serves, for two clusters of two ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import dsx
from dsx.comm.world import current_world
from tests.reference import Recipe, train_reference
from tests.tiny import CASES, TinyNet, batch, mean_loss

NUM_CLUSTERS, RANKS_PER_CLUSTER, ACCUMULATION = 2, 2, 2
PARTS = RANKS_PER_CLUSTER * ACCUMULATION

ZERO: dict[str, dict[str, Any]] = {
    "overlap": {"overlap_comm": True},
    "no_overlap": {"overlap_comm": False},
    "round_robin": {"round_robin_gradients": True},
    "aligned": {"parameter_alignment": True},
    "sub_groups": {"sub_group_size": 20},
    "sub_groups_100": {"sub_group_size": 100},
    "none_persistent": {"stage3_param_persistence_threshold": 0},
    "some_persistent": {"stage3_param_persistence_threshold": 10},
    "offload": {"offload_optimizer": {"device": "cpu"}},
    "offload_all": {
        "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
    },
}  # fmt: skip


class Kind(NamedTuple):
    """One configuration: ZeRO stage, data types, parameter groups, inner optimizer, preset.

    `zero` names rows of `ZERO`; "init" there: the model is made inside `deepspeed.zero.Init`.
    """

    stage: int
    precision: str = "fp32"
    groups: str = "one"
    optimizer: str = "sgd"
    preset: str = "streaming_diloco"
    zero: tuple[str, ...] = ()


class OddNet(TinyNet):
    """With a parameter of one element, of which ZeRO-3 gives the second rank only padding."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.gain = nn.Parameter(torch.full((1,), 0.9))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return super().forward(x * self.gain, y)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    weights = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    return [{"params": weights}, {"params": biases, "lr": 0.05}]


def one_group(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())}]


def frozen_layer(model: nn.Module) -> list[dict[str, Any]]:
    """The second layer and the first bias are frozen, and in no group."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("layers.1.", "layers.0.bias")))
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


GROUPS: dict[str, Callable[[nn.Module], list[dict[str, Any]]]] = {
    "one": one_group,
    "two": two_groups,
    "frozen": frozen_layer,
}


class Fused(torch.optim.AdamW):
    """Stands in for DeepSpeed's FusedAdam, which takes a minute to compile."""


class Int8Momentum(torch.optim.Optimizer):
    """Stands in for 8-bit optimizers, whose kernels need a GPU: codes, and a scale per block."""

    BLOCK = 16

    def __init__(self, groups: Any, lr: float = 0.02) -> None:
        super().__init__(groups, {"lr": lr})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the codes, which torch casts to the parameter's type; as bitsandbytes does."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["codes"] = state["codes"].to(torch.int8)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                blocks = -(-p.numel() // self.BLOCK)
                if not state:
                    state["codes"] = torch.zeros(blocks * self.BLOCK, dtype=torch.int8)
                    state["scales"] = torch.zeros(blocks)
                    state["step"] = 0
                moment = state["codes"].view(blocks, -1).float() * state["scales"][:, None]
                moment = moment.view(-1)
                moment[: p.numel()] = 0.9 * moment[: p.numel()] + p.grad.view(-1).float()
                moment = moment.view(blocks, -1)
                state["scales"] = moment.abs().amax(1) / 127
                codes = moment / state["scales"].clamp(min=1e-12)[:, None]
                state["codes"] = codes.round().to(torch.int8).view(-1)
                state["step"] += 1
                decoded = (state["codes"].view(blocks, -1).float() * state["scales"][:, None]).view(
                    -1
                )
                p.sub_(group["lr"] * decoded[: p.numel()].view_as(p))


class Shampoo(torch.optim.Optimizer):
    """Statistics of other shapes than the parameter's, in a list, as Shampoo and SOAP have."""

    def __init__(self, groups: Any, lr: float = 0.02) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                gradient = p.grad.float()
                matrix = gradient if gradient.dim() == 2 else gradient.view(1, -1)
                if not state:
                    state["statistics"] = [1e-3 * torch.eye(n) for n in matrix.shape]
                left, right = state["statistics"]
                left.add_(matrix @ matrix.T)
                right.add_(matrix.T @ matrix)
                roots = [self._root(one) for one in (left, right)]
                p.sub_(group["lr"] * (roots[0] @ matrix @ roots[1]).view_as(p))

    @staticmethod
    def _root(statistic: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(statistic)
        return vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T


def make_optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.2)
    if name == "fused":
        import deepspeed.runtime.engine as engine

        engine.FusedAdam = Fused
        return Fused(groups, lr=0.01)
    if name == "int8":
        return Int8Momentum(groups)
    if name == "shampoo":
        return Shampoo(groups)
    if name == "adagrad":  # ZeRO replaces it by another of the class
        return torch.optim.Adagrad(groups, lr=0.05)
    return torch.optim.AdamW(groups, lr=0.01)


def ds_config(
    stage: int, precision: str, preset: str, zero: tuple[str, ...] = ()
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
        "dsx": {
            "preset": preset,
            "clusters": {"num_clusters": NUM_CLUSTERS, "deadline_seconds": 30},
            **CASES[preset].overrides,
        },
    }
    for name in zero:
        config["zero_optimization"].update(ZERO.get(name, {}))
    if precision.startswith("bf16"):
        config["bf16"] = {"enabled": True}
    if precision == "bf16+fp32":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 4}
    return config


def quiet() -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def allow_fp16() -> None:
    """Let DeepSpeed train in fp16 on the CPU, where torch does it slowly."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True


def build_engine(kind: tuple[Any, ...], **changes: Any) -> Any:
    """Return an engine with dsx attached; `changes` go into its configuration."""
    return dsx.initialize(**engine_arguments(kind, **changes))[0]


def engine_arguments(kind: tuple[Any, ...], **changes: Any) -> dict[str, Any]:
    kind = Kind(*kind)
    config = {**ds_config(kind.stage, kind.precision, kind.preset, kind.zero), **changes}
    if current_world() is None:
        dsx.init_distributed(config)
    cluster = current_world().cluster_id
    # cluster 0's start is taken everywhere; frozen parameters are the script's
    model = make_model(0 if kind.groups == "frozen" else cluster, kind, config)
    groups = GROUPS[kind.groups](model)
    if kind.optimizer == "muon":
        rates = {"muon_lr": 0.02, "adam_lr": 0.005, "momentum": 0.9, "weight_decay": 0.01}
        config["optimizer"] = {"type": "Muon", "params": {**rates, "torch_adam": True}}
        config["zero_optimization"]["reduce_scatter"] = kind.stage != 3
        parameters = [p for p in model.parameters() if p.requires_grad]
        return {"model": model, "config": config, "model_parameters": parameters}
    if kind.optimizer in ("json", "compiled"):
        params: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.01}
        if kind.optimizer == "json":
            params["torch_adam"] = True
        config["optimizer"] = {"type": "AdamW", "params": params}
        return {"model": model, "config": config, "model_parameters": groups}
    optimizer = make_optimizer(kind.optimizer, groups)
    return {"model": model, "config": config, "optimizer": optimizer}


def make_model(seed: int, kind: Kind, config: dict[str, Any]) -> nn.Module:
    if "init" not in kind.zero:
        return OddNet(seed)
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=config):
        model = OddNet(seed)
    whole = OddNet(seed).state_dict()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        for name, parameter in model.named_parameters():
            parameter.data.copy_(whole[name])
    return model


def train_step(engine: Any, step: int, poison: bool = False, cluster: int | None = None) -> None:
    """Take one step; `cluster` for an engine without dsx."""
    cluster = engine.dsx.cluster_id if cluster is None else cluster
    for micro in range(ACCUMULATION):
        part = engine.global_rank * ACCUMULATION + micro
        x, y = batch(cluster, step, part)
        dtype = next(engine.module.parameters()).dtype
        loss = engine(x.to(dtype), y)
        engine.backward(loss * float("inf") if poison else loss)
        engine.step()


def weights(engine: Any) -> dict[str, Tensor]:
    """The model's weights in fp32; under ZeRO-3 gathered, collectively, for as long as it takes."""
    parameters = dict(engine.module.named_parameters())
    gathered: Any = contextlib.nullcontext()
    if any(hasattr(p, "ds_id") for p in parameters.values()):
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(parameters.values()))
    with gathered:
        return {n: p.detach().float().clone() for n, p in parameters.items()}


def max_bit16_difference(engine: Any) -> float:
    """How far this rank's part of the model's weights is from its rounded masters. Local."""
    from dsx.engines.deepspeed.masters import locate
    from dsx.engines.deepspeed.parameters import trained_parameters

    worst = 0.0
    parameters = trained_parameters(engine)
    for name, piece in locate(engine).pieces(parameters).items():
        parameter = parameters[name]
        own = slice(piece.start, piece.start + piece.numel)
        if hasattr(parameter, "ds_tensor"):
            held = [parameter.ds_tensor.detach().reshape(-1)[: piece.numel]]
            if parameter.ds_status.name == "AVAILABLE":
                held.append(parameter.detach().reshape(-1)[own])
        else:
            held = [parameter.detach().reshape(-1)[own]]
        for weight in held:
            rounded = piece.view().to(weight.dtype).float()
            worst = max(worst, (weight.float() - rounded).abs().max().item())
    return worst


def reference_recipe(preset: str) -> Recipe:
    recipe = CASES[preset].recipe
    fragments = [
        ["gain", *names] if "layers.0.bias" in names else list(names) for names in recipe.fragments
    ]
    return replace(recipe, fragments=fragments)


def reference(
    kind: Kind, num_steps: int, skipped: list[tuple[int, int]] | None = None
) -> list[dict[str, Tensor]]:
    """Every cluster's weights after the same training in plain torch, in fp32."""
    optimizer = kind.optimizer if kind.optimizer in ("sgd", "adagrad") else "adamw"
    return train_reference(
        OddNet(0),
        lambda model: make_optimizer(optimizer, GROUPS[kind.groups](model)),
        lambda model, cluster, step: mean_loss(model, cluster, step, PARTS),
        reference_recipe(kind.preset),
        NUM_CLUSTERS,
        num_steps,
        skipped=skipped or [],
    )[0]
