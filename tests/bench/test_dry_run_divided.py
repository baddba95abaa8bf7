"""`dsx dry-run` and `dsx memory` of DeepSpeed's experts and AutoTP, against small runs of the same.

In clusters of four ranks: experts over all of them, in halves, or in a pipeline; slices over two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsx
from dsx.comm.world import current_world
from dsx.plan.gpt_shapes import GPT, Experts
from tests.bench.test_dry_run import figures_of_run, follow
from tests.bench.test_dry_run_deepspeed import Part, compare_memory, hold_to_runs, weight_bytes
from tests.engines.engines import ACCUMULATION, ds_config, quiet
from tests.engines.test_deepspeed_memory import BLOCK
from tests.installed import needs

RANKS, HIDDEN, FFN, HEADS, GROUPS, WORDS, PLACES, LAYERS, EXPERTS = 4, 32, 80, 4, 2, 60, 20, 4, 4
SIZES: dict[str, Any] = {
    "layers": LAYERS, "hidden": HIDDEN, "ffn": FFN, "heads": HEADS, "groups": GROUPS,
    "vocabulary": WORDS, "is_tied": False,
}  # fmt: skip
SPECS = [  # of a model of one's own, as DeepSpeed's documentation writes them
    {"patterns": [r".*\.(o|down)_proj\.weight$"], "partition_type": "row"},
    {"patterns": [r".*\.([qkv]|gate|up)_proj\.weight$"], "partition_type": "column"},
]


class Kind(NamedTuple):
    """What is divided over how many ranks, under which stage of ZeRO and in which types."""

    divides: str
    stage: int
    precision: str = "fp32"
    size: int = 2
    partition: str | None = None
    tensor: dict[str, Any] = {}
    deals_data_first: bool = False

    def document(self) -> dict[str, Any]:
        config = {**ds_config(self.stage, self.precision, "diloco"), "dsx": BLOCK}
        if self.divides == "experts":
            config["moe"] = {"ep_size": self.size}
            config["use_data_before_expert_parallelism"] = self.deals_data_first
        else:
            config["tensor_parallel"] = {"autotp_size": self.size, **self.tensor}
        if self.partition is not None:
            config["pipeline"] = {"stages": 2, "partition": self.partition}
        return config

    def model(self) -> GPT:
        if self.divides == "tensor":
            return GPT(**SIZES, is_gated=True, is_rms_norm=True, has_bias=False, has_qkv_bias=True)
        layers = tuple(bool(number % 2) for number in range(LAYERS))
        has = (True,) * LAYERS if self.partition else layers
        return GPT(**SIZES, positions=PLACES, experts=Experts(EXPERTS, 48, 2, has, shared=24))


USUAL = [
    Kind("experts", 1, "bf16"),
    Kind("experts", 1, partition="parameters"),
    Kind("tensor", 1, "bf16", tensor={"partition_config": {"layer_specs": SPECS}}),
]
MORE = [
    Kind("experts", 0),
    Kind("experts", 0, "bf16", size=4),
    Kind("experts", 1, deals_data_first=True),
    Kind("experts", 2, "bf16", size=1),
    Kind("experts", 0, "bf16", partition="type:transformer"),
    Kind("experts", 1, "bf16+fp32", partition="uniform"),
    Kind("tensor", 0),
    Kind("tensor", 0, "bf16", tensor={"preset_model": "llama"}),
    Kind("tensor", 2, tensor={"preset_model": "qwen2"}),
    Kind("tensor", 3, "bf16"),
]


def linear(into: int, out: int, has_bias: bool = True) -> nn.Linear:
    return nn.Linear(into, out, bias=has_bias)


def chain(**children: nn.Module) -> Part:
    part = Part()
    for name, child in children.items():
        part.add_module(name, child)
    return part


class Norm(Part):
    """A scale, and a shift."""

    def __init__(self, size: int, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        if has_bias:
            self.bias = nn.Parameter(torch.ones(size))


class Weights(Part):
    """A matrix and its bias, or without."""

    def __init__(self, rows: int, columns: int, has_bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, columns))
        if has_bias:
            self.bias = nn.Parameter(torch.ones(rows))


def mlp(width: int) -> Part:
    return chain(linear_fc1=Weights(width, HIDDEN), linear_fc2=Weights(HIDDEN, width))


class TransformerLayer(Part):
    """Of a user's model, with DeepSpeed's experts beside a shared one, or with an MLP."""

    def __init__(self, size: int | None) -> None:
        super().__init__()
        self.input_layernorm = Norm(HIDDEN, True)
        rows = HIDDEN + 2 * GROUPS * HIDDEN // HEADS
        proj, qkv = Weights(HIDDEN, HIDDEN), Weights(rows, HIDDEN)
        self.self_attention = chain(linear_proj=proj, linear_qkv=qkv)
        self.pre_mlp_layernorm = Norm(HIDDEN, True)
        self.mlp = mlp(FFN) if size is None else chain(moe=mixture(size), shared_experts=mlp(24))


def mixture(size: int) -> nn.Module:
    from deepspeed.moe.layer import MoE

    class Alone(MoE):
        """Whose output is all that goes on."""

        def forward(self, *inputs: Any) -> Tensor:
            return super().forward(*inputs)[0]

    return Alone(HIDDEN, mlp(48), EXPERTS, size, k=2, min_capacity=16)


def user_model(kind: Kind) -> nn.Module:
    """What a script would give DeepSpeed."""
    if kind.divides == "tensor":
        return Decoder()
    experts = kind.model().experts
    assert experts is not None
    layers = [TransformerLayer(kind.size if has else None) for has in experts.layers]
    embedding = chain(
        word_embeddings=Weights(WORDS, HIDDEN, False),
        position_embeddings=Weights(PLACES, HIDDEN, False),
    )
    decoder = chain(layers=chain(**{str(i): layer for i, layer in enumerate(layers)}))
    decoder.add_module("final_layernorm", Norm(HIDDEN, True))
    return chain(embedding=embedding, decoder=decoder, output_layer=Weights(WORDS, HIDDEN, False))


def user_pipeline(kind: Kind) -> Any:
    from deepspeed.pipe import LayerSpec, PipelineModule

    layers = [
        LayerSpec(Weights, WORDS, HIDDEN, False),
        LayerSpec(Weights, PLACES, HIDDEN, False),
        *(LayerSpec(TransformerLayer, kind.size) for _ in range(LAYERS)),
        LayerSpec(Norm, HIDDEN, True),
        LayerSpec(Weights, WORDS, HIDDEN, False),
    ]
    return PipelineModule(
        layers, num_stages=2, partition_method=kind.partition,
        loss_fn=lambda x, y: F.mse_loss(x.float(), y.float()),
    )  # fmt: skip


class Decoder(nn.Module):
    """With the modules and names of a Hugging Face decoder, its order, and its plan of slices."""

    _tp_plan = {"lm_head": "colwise_rep"}

    def __init__(self) -> None:
        super().__init__()
        plan = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
        plan |= {f"layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")}
        plan |= {"layers.*.self_attn.o_proj": "rowwise", "layers.*.mlp.down_proj": "rowwise"}
        self.config = SimpleNamespace(
            num_attention_heads=HEADS, num_key_value_heads=GROUPS, hidden_size=HIDDEN,
            base_model_tp_plan=plan,
        )  # fmt: skip
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(WORDS, HIDDEN)
        self.model.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.model.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = linear(HIDDEN, WORDS, False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x)).float()


class DecoderLayer(nn.Module):
    """Gated, with a mixing of tokens that asks for no whole heads."""

    def __init__(self) -> None:
        super().__init__()
        narrow = GROUPS * HIDDEN // HEADS
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.q_proj = linear(HIDDEN, HIDDEN)
        self.self_attn.k_proj = linear(HIDDEN, narrow)
        self.self_attn.v_proj = linear(HIDDEN, narrow)
        self.self_attn.o_proj = linear(HIDDEN, HIDDEN, False)
        self.mlp.gate_proj = linear(HIDDEN, FFN, False)
        self.mlp.up_proj = linear(HIDDEN, FFN, False)
        self.mlp.down_proj = linear(FFN, HIDDEN, False)
        self.input_layernorm = nn.RMSNorm(HIDDEN)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        own, normed = self.self_attn, self.input_layernorm(x)
        keys, values = (one(normed).mean(-1, True) for one in (own.k_proj, own.v_proj))
        x = x + own.o_proj(own.q_proj(normed) * keys + values)
        normed = self.post_attention_layernorm(x)
        return x + self.mlp.down_proj(F.silu(self.mlp.gate_proj(normed)) * self.mlp.up_proj(normed))


def groups_of(kind: Kind, model: nn.Module) -> Any:
    parameters = list(model.parameters())
    if kind.divides == "tensor":
        return parameters
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    return split({"params": parameters, "name": "all"})


def held(kind: Kind) -> dict[str, Any]:
    """What a rank of a run of this kind has and sends."""
    from deepspeed.utils import groups

    from dsx.engines.deepspeed.engine import adopt_world
    from dsx.engines.deepspeed.parameters import stepping_optimizer

    config = kind.document()
    if current_world() is None:
        dsx.init_distributed(config)
    adopt_world()
    groups.mpu = None  # of the engine before
    forget_experts(groups)
    torch.manual_seed(0)  # what ranks hold alike has to begin alike
    model = user_model(kind) if kind.partition is None else user_pipeline(kind)
    optimizer = torch.optim.AdamW(groups_of(kind, model), lr=0.01)
    engine = dsx.initialize(model=model, config=config, optimizer=optimizer)[0]
    last = follow(engine.dsx)
    dtype = next(engine.module.parameters()).dtype
    is_tensor = kind.divides == "tensor"
    x = torch.arange(12).view(3, 4) if is_tensor else torch.ones(3, 4, HIDDEN, dtype=dtype)
    for _ in range(9):
        if kind.partition is None:
            for _ in range(ACCUMULATION):
                engine.backward(engine(x).float().square().mean())
                engine.step()
        else:
            engine.train_batch(iter([(x, x)] * ACCUMULATION))
    states = [(k, v) for s in stepping_optimizer(engine).state.values() for k, v in s.items()]
    found = {
        **figures_of_run(engine.dsx, last),
        "weights": weight_bytes(engine),
        "moments": sum(4 * v.numel() for k, v in states if k.startswith("exp_avg")),
    }
    engine.dsx.close()
    engine.destroy()
    return found


def forget_experts(groups: Any) -> None:
    """Drop DeepSpeed's groups of experts, which it keeps by their size whatever their order."""
    for name, value in vars(groups).items():
        if name.startswith("_EXPERT") and isinstance(value, dict):
            value.clear()


def all_held(kinds: Sequence[Kind]) -> list[dict[str, Any]]:
    quiet()
    return [held(kind) for kind in kinds]


@needs("deepspeed")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(USUAL, marks=pytest.mark.ci, id="usual"),
        pytest.param(MORE, marks=pytest.mark.slow, id="more"),
    ],
)
def test_experts_and_slices_are_what_runs_have(kinds: Sequence[Kind]) -> None:
    hold_to_runs(kinds, all_held, partial(compare_memory, rel=0.03))
