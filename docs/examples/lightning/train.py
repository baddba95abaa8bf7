"""Predict the next byte of README.md, with Lightning: validated, and its best kept."""

from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LENGTH = 32


class NextByte(pl.LightningModule):
    """A model of the byte that follows the last LENGTH ones."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * LENGTH, 128), nn.ReLU(),
            nn.Linear(128, 256),
        )  # fmt: skip

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0][:, :-1]), batch[0][:, -1])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.002)


def main() -> None:
    pl.seed_everything(0)
    text = torch.tensor(list(Path("README.md").read_bytes()))
    data = text.unfold(0, LENGTH + 1, 1)
    held_out = TensorDataset(data[-512:])
    keep = ModelCheckpoint("runs/example_lightning", monitor="val_loss", save_top_k=1)
    trainer = pl.Trainer(
        strategy="ddp", accelerator="cpu", max_steps=100, val_check_interval=50, callbacks=[keep],
        enable_progress_bar=False, logger=False,
    )  # fmt: skip
    model = NextByte()
    train = DataLoader(TensorDataset(data[:-512]), batch_size=16, shuffle=True)
    trainer.fit(model, train, DataLoader(held_out, batch_size=64))
    trainer.validate(model, DataLoader(held_out, batch_size=64))
    trainer.save_checkpoint("runs/example_lightning/final.ckpt")
    if trainer.is_global_zero:
        norm = sum(float(p.detach().double().square().sum()) for p in model.parameters())
        print(f"norm of the model {norm:.9f}", flush=True)


if __name__ == "__main__":
    main()
