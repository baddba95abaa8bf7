"""Predict the next bytes of README.md: a pipeline with ZeRO-1 whose every layer has experts."""

import argparse
from pathlib import Path

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int)
parser.add_argument("--stages", type=int, default=2, help="of the pipeline")
parser.add_argument("--layers", type=int, default=2, help="a stage has at least one")
parser.add_argument("--hidden", type=int, default=32)
parser.add_argument("--heads", type=int, default=2)
parser.add_argument("--experts", type=int, default=4, help="of a layer, two for each token")
parser.add_argument("--length", type=int, default=32, help="of a window, in bytes")
parser.add_argument("--steps", type=int, default=40)
args = parser.parse_args()
deepspeed.init_distributed()
BALANCE = 0.01  # weight of the loss that balances the experts of all layers
expert_ranks = min(args.experts, torch.distributed.get_world_size() // args.stages)


class Embedding(nn.Module):
    """From bytes to the residual stream, and the sum of what balances the experts."""

    def __init__(self):
        super().__init__()
        self.bytes = nn.Embedding(256, args.hidden)
        self.places = nn.Embedding(args.length, args.hidden)

    def forward(self, text):
        places = torch.arange(text.shape[1], device=text.device)
        x = self.bytes(text) + self.places(places)
        return x, x.new_zeros(1)


class Layer(nn.Module):
    """Attention, and experts over the data-parallel ranks of the stage."""

    def __init__(self):
        super().__init__()
        hidden = args.hidden
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        expert = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )
        self.experts = MoE(hidden, expert, args.experts, ep_size=expert_ranks, k=2)

    def forward(self, stream):
        x, balance = stream
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, args.heads, -1)).transpose(1, 3)
        attended = scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        mixed, loss, _ = self.experts(self.norms[1](x))
        return x + mixed, balance + loss


class Head(nn.Module):
    """From the residual stream to scores of bytes."""

    def __init__(self):
        super().__init__()
        self.norm, self.scores = nn.LayerNorm(args.hidden), nn.Linear(args.hidden, 256)

    def forward(self, stream):
        return self.scores(self.norm(stream[0])), stream[1]


def loss_of(outputs, targets):
    scores, balance = outputs
    return cross_entropy(scores.flatten(0, 1).float(), targets.flatten()) + BALANCE * balance.sum()


torch.manual_seed(0)
layers = [LayerSpec(Embedding), *(LayerSpec(Layer) for _ in range(args.layers)), LayerSpec(Head)]
model = PipelineModule(
    layers, num_stages=args.stages, loss_fn=loss_of, partition_method="type:Layer"
)
windows = torch.tensor(list(Path("README.md").read_bytes())).unfold(0, args.length + 1, 1)
groups = split({"params": list(model.parameters()), "name": "all"})
engine, *_ = deepspeed.initialize(
    args=args, model=model, model_parameters=groups,
    training_data=torch.utils.data.TensorDataset(windows[:, :-1], windows[:, 1:]),
)  # fmt: skip
for step in range(1, args.steps + 1):
    loss = engine.train_batch()
    if step % 10 == 0 and engine.global_rank == 0:
        print(f"step {step}: loss {loss:.2f}", flush=True)
engine.save_checkpoint("runs/example_pipeline_experts/checkpoints", tag="last")
if engine.global_rank == 0:
    norm = sum(float(p.detach().double().square().sum()) for p in model.parameters())
    print(f"norm of the model {norm:.9f}", flush=True)
