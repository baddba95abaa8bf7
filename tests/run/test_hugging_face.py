"""What dsx.run does for a Trainer, part by part, without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from dsx.config.files import ConfigError
from dsx.run.block import RunBlock
from dsx.run.data import ClusterStream, cut_for_cluster
from dsx.run.folders import move_into
from dsx.run.hugging_face.arguments import replace_deepspeed_config
from dsx.run.hugging_face.checkpoints import choose_common
from dsx.run.hugging_face.trainer import replace_trainer
from dsx.run.session import RouteNotTaken, Session

A, B = [4, "run a"], [8, "run a"]


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ([(None, {"checkpoint-4": A, "checkpoint-8": B})] * 2, ["checkpoint-8"] * 2),
        (
            [(None, {"checkpoint-4": A, "checkpoint-8": B}), (None, {"checkpoint-4": A})],
            ["checkpoint-4"] * 2,
        ),
        ([(None, {"checkpoint-4": A}), (None, {})], None),
        ([(None, {"checkpoint-4": A}), (None, {"checkpoint-4": [4, "run b"]})], None),
        ([("checkpoint-4", {"checkpoint-4": A, "checkpoint-8": B})] * 2, ["checkpoint-4"] * 2),
        (  # told to end: each at a step of its own, of one run
            [
                (None, {"checkpoint-4": A, "checkpoint-6": [None, "run a"]}),
                (None, {"checkpoint-4": A, "checkpoint-7": [None, "run a"]}),
            ],
            ["checkpoint-6", "checkpoint-7"],
        ),
        (  # one was saved again by a later run
            [
                (None, {"checkpoint-9": [9, "run b"], "checkpoint-10": [10, "run b"]}),
                (None, {"checkpoint-9": [9, "run b"], "checkpoint-10": [10, "run a"]}),
            ],
            ["checkpoint-9"] * 2,
        ),
    ],
)
def test_the_newest_checkpoint_that_all_clusters_have(found: Any, chosen: Any) -> None:
    assert choose_common(found) == chosen


def test_files_come_to_a_common_folder_as_a_whole(tmp_path: Path) -> None:
    for cluster in ("0", "1"):
        source = tmp_path / f".final.cluster_{cluster}"
        (source / "inner").mkdir(parents=True)
        (source / "model").write_text(cluster)
        (source / "inner" / "state").write_text(cluster)
        move_into(source, tmp_path / "final")
        assert not source.exists()
    assert (tmp_path / "final" / "model").read_text() == "1"
    assert (tmp_path / "final" / "inner" / "state").read_text() == "1"


class Numbers(IterableDataset[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(range(10))


def test_a_stream_is_divided_between_clusters() -> None:
    numbers = Numbers()
    parts = [ClusterStream(numbers, m, 3) for m in range(3)]
    assert [list(part) for part in parts] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    parts[0].set_epoch(2)
    assert numbers.epoch == 2


class Sized(Numbers):
    def __len__(self) -> int:
        return 10


def test_a_stream_that_knows_its_length_keeps_one(caplog: pytest.LogCaptureFixture) -> None:
    worlds = [SimpleNamespace(cluster_id=m, num_clusters=3, rank=0) for m in range(3)]
    parts = [cut_for_cluster(Sized(), world, "auto") for world in worlds]  # type: ignore[arg-type]
    assert [len(part) for part in parts] == [3, 3, 3]
    assert [list(part) for part in parts] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert "one in 3 of the streamed examples (clusters.data='own' reads all of" in caplog.text
    assert not hasattr(ClusterStream(Numbers(), 0, 3), "__len__")
    own: Any = Sized()
    assert cut_for_cluster(own, worlds[0], "own") is own  # type: ignore[arg-type]


def fake_trainer(**arguments: Any) -> Any:
    """A module with a Trainer of the methods that are replaced, and one of it."""
    module = ModuleType("transformers.trainer")

    class Trainer:
        is_deepspeed_enabled = True
        args = SimpleNamespace(
            **{
                "auto_find_batch_size": False,
                "save_on_each_node": False,
                "save_only_model": False,
                **arguments,
            }
        )

        def train(self) -> None: ...
        def create_optimizer(self) -> None: ...
        def evaluate(self) -> str:
            return "evaluated"

        def save_model(self) -> None: ...
        def _save_checkpoint(self) -> None: ...
        def _load_best_model(self) -> None: ...

    module.__dict__.update(Trainer=Trainer, deepspeed_load_checkpoint=lambda engine, path: path)
    return module


BLOCK = {"preset": "diloco", "clusters": {"num_clusters": 2}}


@pytest.mark.parametrize(
    ("arguments", "block", "is_enabled", "kind", "said"),
    [
        ({}, {}, False, RouteNotTaken, "the Trainer trains without DeepSpeed"),
        ({"auto_find_batch_size": True}, {}, True, ConfigError, "auto_find_batch_size=True"),
        ({"save_on_each_node": True}, {}, True, ConfigError, "save_on_each_node=True"),
        ({}, {"checkpoints": {"keep": 3}}, True, ConfigError, "dsx.checkpoints.keep=3 would"),
        (
            {"save_only_model": True}, {"checkpoints": {"remote": "s3://b/r"}}, True, ConfigError,
            "TrainingArguments(save_only_model=True)",
        ),
        (
            {}, {"divergence": {"max_rollbacks": 1}}, True, ConfigError,
            "dsx.divergence.max_rollbacks=1 is not served",
        ),
    ],
)  # fmt: skip
def test_what_a_trainer_cannot_do_is_refused_before_it_trains(
    arguments: dict[str, Any], block: dict[str, Any], is_enabled: bool, kind: Any, said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    module = fake_trainer(**arguments)
    session = Session(RunBlock([], {}, [json.dumps({"dsx": {**BLOCK, **block}})]))
    monkeypatch.setattr(session, "join", lambda: object())
    replace_trainer(session, module, ModuleType("transformers.trainer_callback"))
    trainer = module.Trainer()
    trainer.is_deepspeed_enabled = is_enabled
    with pytest.raises(kind) as caught:
        trainer.train()
    assert said in str(caught.value)
    assert trainer.evaluate() == "evaluated"
    assert module.deepspeed_load_checkpoint(object(), "there") == "there"


def test_training_a_second_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake_trainer()
    session = Session(RunBlock([], {}, [json.dumps({"dsx": BLOCK})]))
    monkeypatch.setattr(session, "join", lambda: object())
    replace_trainer(session, module, ModuleType("transformers.trainer_callback"))
    trainer = module.Trainer()
    session.trainers.append(trainer)
    with pytest.raises(ConfigError, match=r"Trainer.train\(\) is called a second time"):
        trainer.train()


def test_the_block_is_taken_out_of_accelerates_config() -> None:
    module = ModuleType("accelerate.utils.deepspeed")

    class HfDeepSpeedConfig:
        def __init__(self, config_file_or_dict: Any) -> None:
            self.config = dict(config_file_or_dict)

    module.__dict__["HfDeepSpeedConfig"] = HfDeepSpeedConfig
    session = Session(RunBlock([], {}, []))
    session.join = lambda: None  # type: ignore[method-assign]
    replace_deepspeed_config(session, module)
    made = module.HfDeepSpeedConfig(
        {"bf16": {}, "dsx": {**BLOCK, "compression": {"kernels": "auto"}}}
    )
    assert made.config == {"bf16": {}}
    assert session.block.is_known
