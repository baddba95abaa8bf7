"""A script of somebody who uses Lightning and has not heard of dsx."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

parser = argparse.ArgumentParser()
parser.add_argument("--package", default="lightning")  # or pytorch_lightning
parser.add_argument("--strategy", default="ddp")
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--max_steps", type=int, default=8)
parser.add_argument("--max_epochs", type=int, default=-1)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--every", type=int, default=0)
parser.add_argument("--by", default=None)
parser.add_argument("--top_k", type=int, default=-1)
parser.add_argument("--val_every", type=int, default=0)
parser.add_argument("--patience", type=int, default=0)
parser.add_argument("--cluster", type=int, default=0)  # whose evaluation differs
parser.add_argument("--differs", type=float, default=0.0)
parser.add_argument("--stops_at", type=int, default=0)
parser.add_argument("--resume", default=None)
parser.add_argument("--out", default="final.ckpt")
parser.add_argument("--root", default="runs")
parser.add_argument("--data", default="map")
parser.add_argument("--manual", action="store_true")
parser.add_argument("--one_file", action="store_true")  # of all shards
parser.add_argument("--weights_only", action="store_true")
parser.add_argument("--config", default=None)
parser.add_argument("--max_time", default=None)
parser.add_argument("--callback", default=None)
parser.add_argument("--step_seconds", type=float, default=0.0)
parser.add_argument("--local_rank", type=int)
args = parser.parse_args()

if args.package == "lightning":
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
else:
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
    from pytorch_lightning.strategies import DeepSpeedStrategy, ModelParallelStrategy

SAMPLES, SIZE = 48, 6


class Samples(Dataset[Any]):
    """Pairs of numbers; `read` are those that were asked for."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(SAMPLES, SIZE, generator=generator)
        self.y = self.x.sin().sum(1, keepdim=True)
        self.read: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(int(index))
        return self.x[index], self.y[index]


class Stream(IterableDataset[Any]):
    """The same, one after the other, without a length."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return ((self.samples.x[i], self.samples.y[i]) for i in range(SAMPLES))


class Net(pl.LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = not args.manual
        self.first, self.second = nn.Linear(SIZE, 16), nn.Linear(16, 1)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if args.strategy != "fsdp2" or hasattr(self.first, "unshard"):
            return
        from torch.distributed.fsdp import fully_shard

        mesh = self.device_mesh["data_parallel"]
        for module in (self.first, self.second):
            fully_shard(module, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, index: int) -> Tensor | None:
        if args.step_seconds:
            print(f"AT {self.trainer.global_step}", flush=True)
            time.sleep(args.step_seconds)
        loss = self.loss(batch)
        self.log("train_loss", loss)
        if args.stops_at and args.cluster and self.trainer.global_step == args.stops_at:
            self.trainer.should_stop = True
        if not args.manual:
            return loss
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return None

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        worse = args.differs * (self.trainer.global_step if args.cluster else 1)
        self.losses.append(float(self.trainer.callback_metrics["val_loss"]))
        self.log("score", self.trainer.callback_metrics["val_loss"] + worse, sync_dist=True)

    def configure_optimizers(self) -> Any:
        if args.manual:
            return [
                torch.optim.SGD(self.first.parameters(), lr=0.02, momentum=0.9),
                torch.optim.AdamW(self.second.parameters(), lr=0.01),
            ]
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def as_list(tensor: Tensor) -> Any:
    return tensor.tolist()


def make_strategy() -> Any:
    if args.strategy == "fsdp2":
        return ModelParallelStrategy(
            data_parallel_size=args.devices, tensor_parallel_size=1, process_group_backend="gloo",
            save_distributed_checkpoint=not args.one_file,
        )  # fmt: skip
    if args.strategy == "deepspeed":
        config = json.loads(Path(args.config).read_text())
        return DeepSpeedStrategy(config=config, process_group_backend="gloo")
    return args.strategy


def main() -> None:
    pl.seed_everything(0, verbose=False)
    train, held_out = Samples(1), Samples(2)
    data: Any = Stream(train) if args.data == "stream" else train
    callbacks: list[Any] = []
    checkpoint = None
    if args.every or args.by:
        checkpoint = ModelCheckpoint(
            f"{args.root}/ck", monitor=args.by, save_top_k=args.top_k,
            every_n_train_steps=args.every or None, save_last=not args.weights_only,
            save_weights_only=args.weights_only,
        )  # fmt: skip
        callbacks.append(checkpoint)
    if args.patience:
        callbacks.append(EarlyStopping("score", patience=args.patience))
    if args.callback:
        callbacks.append(getattr(pl.callbacks, args.callback)())
    trainer = pl.Trainer(
        strategy=make_strategy(), accelerator="cpu", devices=args.devices,
        max_steps=args.max_steps, max_epochs=args.max_epochs, max_time=args.max_time,
        accumulate_grad_batches=args.accumulate, default_root_dir=args.root, callbacks=callbacks,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=2,
        enable_checkpointing=bool(callbacks), logger=bool(args.by),
        val_check_interval=args.val_every or None, num_sanity_val_steps=0,
        check_val_every_n_epoch=None if args.val_every else 1,
        limit_val_batches=None if args.val_every else 0,
    )  # fmt: skip
    net = Net()
    loader = DataLoader(data, batch_size=2, shuffle=args.data == "map")
    trainer.fit(net, loader, DataLoader(held_out, batch_size=8), ckpt_path=args.resume)
    after = trainer.validate(net, DataLoader(held_out, batch_size=8), verbose=False)
    trainer.save_checkpoint(args.out)
    full = [p.detach() for p in net.parameters()]
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in full]
    scores = checkpoint.best_k_models if checkpoint else {}
    told = {
        "read": train.read,
        "evaluated": len(held_out.read),
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "losses": net.losses,
        "after": after,
        "world": trainer.world_size,
        "norm": sum(p.double().pow(2).sum().item() for p in full),
        "best": checkpoint and checkpoint.best_model_path,
        "scores": {Path(k).name: float(v) for k, v in scores.items()},
        "weights": dict(
            zip([n for n, _ in net.named_parameters()], map(as_list, full), strict=True)
        ),
    }
    folder = Path(args.root) / f"told_{args.cluster}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{trainer.global_rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
