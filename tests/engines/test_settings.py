"""What clusters compare of optimizers, models, DeepSpeed's JSON and Megatron's arguments."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dsx
from dsx.comm.world import current_world
from dsx.engines.megatron.settings import settings_of_arguments
from dsx.engines.settings import (
    settings_of_modules,
    settings_of_optimizers,
    settings_of_schedule,
)
from tests.distributed import run_distributed
from tests.installed import needs


class Scaled(nn.Module):
    """A norm of a script's own."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.variance_epsilon, self.device_number = eps, 3
        self.dropout = nn.Dropout(0.1)


def test_an_optimizer_is_read_by_setting_and_group() -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    groups: list[dict[str, Any]] = [{"params": [a]}, {"params": [b], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=torch.tensor(0.5), weight_decay=0.1)
    read = settings_of_optimizers([adamw, torch.optim.SGD([a], lr=0.25, momentum=0.9)])
    assert read["type"] == ["AdamW", "AdamW", "SGD"]
    assert read["lr"] == [0.5, 0.5, 0.25]
    assert read["weight_decay"] == [0.1, 0.0, 0]
    assert read["betas"] == [[0.9, 0.999], [0.9, 0.999], None]
    assert read["momentum"] == [None, None, 0.9]
    assert not {"params", "fused", "foreach", "capturable"} & set(read)


def test_a_schedule_is_read() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.5)
    read = settings_of_schedule(torch.optim.lr_scheduler.StepLR(optimizer, 30, gamma=0.2))
    assert (read["type"], read["step_size"], read["gamma"]) == ("StepLR", 30, 0.2)
    assert read["base_lrs"] == [0.5]
    assert settings_of_schedule(None) == {}


def test_modules_are_read_by_their_numbers() -> None:
    model = nn.Sequential(nn.LayerNorm(4, eps=1e-3), Scaled(1e-6), nn.MultiheadAttention(4, 2))
    read = settings_of_modules(model.named_modules())
    assert read["0"]["eps"] == 1e-3
    assert read["1"] == {"variance_epsilon": 1e-6}
    assert read["1.dropout"]["p"] == 0.1
    assert read["2"]["num_heads"] == 2
    assert all("training" not in values for values in read.values())


def test_megatrons_arguments_are_read(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("here.model", "there.model")]
    for file in files:
        file.write_text("the same")
    given = {
        "lr": 1e-3, "min_lr": 1e-4, "lr_decay_style": "cosine", "clip_grad": 1.0,
        "norm_epsilon": 1e-5, "weight_decay": 0.1, "split": "99,1,0",
        "params_dtype": torch.bfloat16, "eval_iters": 10,
        "use_checkpoint_opt_param_scheduler": False,
    }  # fmt: skip
    own = {
        "save": "/a", "load": "/b", "data_path": ["/c"], "rank": 3, "local_rank": 3,
        "num_workers": 4, "use_nsys_profiler": True, "tensorboard_dir": "/d", "log_interval": 5,
        "master_port": 29500, "micro_batch_size": 2, "consumed_train_samples": 8,
        "dsx_cluster_id": 1,
        "recompute_granularity": "full",
    }  # fmt: skip
    tokenizer = {"tokenizer_type": "GPT", "vocab_file": None, "tokenizer_model": str(files[0])}
    read = settings_of_arguments(Namespace(**given, **own, **tokenizer, handler=print))
    digest = read.pop("tokenizer_model")
    assert read == {**given, "params_dtype": "torch.bfloat16", "tokenizer_type": "GPT"}
    moved = {**tokenizer, "tokenizer_model": str(files[1])}
    assert settings_of_arguments(Namespace(**moved))["tokenizer_model"] == digest
    files[1].write_text("another")
    assert settings_of_arguments(Namespace(**moved))["tokenizer_model"] != digest
    for place in ("one", "two"):  # beside weights and what a downloader has left
        folder = tmp_path / place
        (folder / ".cache").mkdir(parents=True)
        (folder / "tokenizer.json").write_text("{}")
        for name in ("model.safetensors", ".cache/tokenizer.json.metadata"):
            (folder / name).write_text(place)
    folders = [str(tmp_path / place) for place in ("one", "two")]
    ours, theirs = (settings_of_arguments(Namespace(tokenizer_model=f)) for f in folders)
    assert ours == theirs and ours["tokenizer_model"].startswith("of digest")
    (tmp_path / "two" / "tokenizer.json").write_text("[]")
    assert settings_of_arguments(Namespace(tokenizer_model=folders[1])) != ours
    assert settings_of_arguments(Namespace(tokenizer_model="a/b")) == {"tokenizer_model": "a/b"}


def block(**clusters: Any) -> dict[str, Any]:
    clusters = {"num_clusters": 2, "deadline_seconds": 30, **clusters}
    return {"dsx": {"preset": "diloco", "clusters": clusters}}


def attach_plain(rate: float, eps: float, **arguments: Any) -> str:
    """Attach a new model; return what it said, if anything."""
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2, eps=eps))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    try:
        dsx.attach(model, optimizer, **{"config": block(), **arguments}).close()
    except ValueError as error:
        return str(error)
    return "no error"


def start_deepspeed(**changes: Any) -> str:
    """Initialize; `changes` go into this cluster's JSON."""
    config: dict[str, Any] = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        **block(),
    }
    for key, value in changes.items():
        kept = config.get(key)
        config[key] = {**kept, **value} if isinstance(kept, dict) else value
    model = nn.Linear(2, 2)
    try:
        engine, *_ = dsx.initialize(model=model, model_parameters=model.parameters(), config=config)
    except ValueError as error:
        return str(error)
    engine.dsx.close()
    return "no error"


def start_unequal() -> list[str]:
    import logging

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    dsx.init_distributed(block())
    world = current_world()
    assert world is not None
    is_second = world.cluster_id == 1
    rate = 0.2 if is_second else 0.1
    rates = {"lr": 0.02} if is_second else {}
    steps = {"warmup_num_steps": 20} if is_second else {}
    warm = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, **steps}}
    adamw = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True, **rates}}
    told = {"train_micro_batch_size_per_gpu": 2 if is_second else 4}
    told |= {"steps_per_print": 7 if is_second else 8}
    told |= {"zero_optimization": {"reduce_bucket_size": 1000 if is_second else 2000}}
    clip = {"gradient_clipping": 2.0 if is_second else 1.0}
    meant = {"dsx": {"clusters": {**block()["dsx"]["clusters"], "may_differ": ["deepspeed"]}}}
    one_meant = {"dsx": block(may_differ=["optimizer.lr"] if is_second else [])["dsx"]}
    return [
        attach_plain(rate, 1e-5),
        attach_plain(rate, 1e-5, config=block(may_differ=["optimizer.lr"])),
        attach_plain(0.1, 1e-6 if is_second else 1e-5),
        attach_plain(0.1, 1e-5, facts={"warmup": world.cluster_id}),
        attach_plain(0.1, 1e-5, config=one_meant),
        attach_plain(0.1, 1e-5, config=block(anchor_check_interval=4 + world.cluster_id)),
        attach_plain(0.1, 1e-5, config=block(may_differ=["optimizer.rl"])),
        start_deepspeed(),
        start_deepspeed(**told),
        start_deepspeed(**clip),
        start_deepspeed(**clip, **meant),
        start_deepspeed(optimizer=adamw),
        start_deepspeed(scheduler=warm),
        attach_plain(0.1, 1e-5, config=block(data="own")),
        start_deepspeed(dsx=block(validation="average")["dsx"]),
    ]


@needs("deepspeed")
def test_clusters_that_would_train_differently_are_refused() -> None:
    first, second = run_distributed(start_unequal, 2, timeout_seconds=120)
    assert first == second
    rate, meant, eps, facts, one_meant, anchors, unknown, *engines = first
    assert "clusters train differently: optimizer.lr[0]: cluster 0 has 0.1, cluster 1 has" in rate
    assert "name 'optimizer.lr[0]' in clusters.may_differ" in rate
    assert meant == "no error"
    assert "model.1.eps: cluster 0 has 1e-05, cluster 1 has 1e-06" in eps
    assert "do not match at facts.warmup: cluster 0 has 0, cluster 1 has 1" in facts
    assert "the length of dsx.clusters.may_differ: cluster 0 has 0, cluster 1 has 1" in one_meant
    assert "dsx.clusters.anchor_check_interval: cluster 0 has 4, cluster 1 has 5" in anchors
    assert "did you mean 'optimizer.lr'?" in unknown
    alike, told, clip, clip_meant, adamw, warm, data, validation = engines
    assert alike == told == clip_meant == "no error"
    assert "deepspeed.gradient_clipping: cluster 0 has 1.0, cluster 1 has 2.0" in clip
    assert "cluster 0 has 0.01, cluster 1 has 0.02" in adamw
    assert "lr_scheduler.warmup_num_steps: cluster 0 has 10, cluster 1 has 20" in warm
    assert "dsx.clusters.data='own' has no effect here" in data
    assert "dsx.clusters.validation='average' has no effect here" in validation


def test_names_are_a_list_of_texts() -> None:
    config = dsx.load_config(block(may_differ=["optimizer.lr"]))
    assert config.clusters.may_differ == ("optimizer.lr",)
    assert dsx.load_config({"dsx": config.block()}).block() == config.block()
    with pytest.raises(dsx.ConfigError, match=r"clusters.may_differ='optimizer.lr'"):
        dsx.load_config(block(may_differ="optimizer.lr"))
