"""The rows of `dsx bench examples`, and the sources that they run."""

from __future__ import annotations

from typing import Any

from dsx.bench.examples.table import Row, Tree

TRANSFORMERS = Tree(
    "transformers", "https://github.com/huggingface/transformers",
    "3a275d3581c0ecf962f7412aa764c2047331fd6b",
)  # fmt: skip
TRL = Tree("trl", "pip download --no-deps --no-binary :all: trl==1.16.0", "trl-1.16.0")
NANOGPT = Tree(
    "nanoGPT", "https://github.com/karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"
)
TORCHTITAN = Tree("torchtitan", "https://github.com/pytorch/torchtitan", "v0.2.2")
ACCELERATE = Tree("accelerate", "https://github.com/huggingface/accelerate", "v1.14.0")
LIGHTNING = Tree("lightning", "https://github.com/Lightning-AI/pytorch-lightning", "2.6.5")

_DILOCO = {"preset": "diloco", "schedule": {"interval": 10}}
_STREAMING = {
    "preset": "streaming_diloco",
    "schedule": {"interval": 10},
    "fragments": {"num_fragments": 2},
    "delay": {"steps": 2},
}
_STEPS = 40


def _deepspeed(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    }


_TRAINER = (
    "--deepspeed", "{json}", "--output_dir", "{out}/trained", "--max_steps", str(_STEPS),
    "--per_device_train_batch_size", "4", "--learning_rate", "1e-3", "--report_to", "none",
    "--logging_steps", "10", "--save_strategy", "no", "--use_cpu", "true",
    "--lr_scheduler_type", "constant", "--bf16", "false",
)  # fmt: skip


def _run_clm(stage: int, ranks: int, method: dict[str, Any]) -> Row:
    return Row(
        name=f"run_clm-zero{stage}-2x{ranks}",
        framework="Trainer",
        tree=TRANSFORMERS,
        script="examples/pytorch/language-modeling/run_clm.py",
        engine=f"DeepSpeed, ZeRO {stage}",
        ranks=ranks,
        arguments=(
            "--config_name", "{data}/gpt2", "--tokenizer_name", "{data}/gpt2",
            "--train_file", "{data}/train.txt", "--validation_file", "{data}/validation.txt",
            "--block_size", "64", "--do_train", "--do_eval", "--per_device_eval_batch_size", "8",
            "--max_eval_samples", "64", *_TRAINER,
        ),
        prepared="language_model",
        packages=("transformers", "datasets", "evaluate", "deepspeed"),
        loss=r"eval_loss\s*=\s*([0-9.]+)",
        loss_of="held out",
        steps=_STEPS,
        sha256="d55f4705f486",
        method=method,
        deepspeed=_deepspeed(stage),
        plain_deepspeed=_deepspeed(2) if stage == 3 else None,  # its ZeRO 3 starts on GPUs only
    )  # fmt: skip


def _sft(stage: int, ranks: int, more: tuple[str, ...], what: str, method: dict[str, Any]) -> Row:
    return Row(
        name=f"sft{'-lora' if more else ''}-zero{stage}-2x{ranks}",
        framework=f"TRL, SFT{what}",
        tree=TRL,
        script="trl/scripts/sft.py",
        engine=f"DeepSpeed, ZeRO {stage}",
        ranks=ranks,
        arguments=(
            "--model_name_or_path", "{data}/gpt2", "--dataset_name", "{data}/sft",
            "--max_length", "64", "--eval_strategy", "steps", "--eval_steps", str(_STEPS),
            "--gradient_checkpointing", "false", *_TRAINER, *more,
        ),
        prepared="language_model",
        packages=("trl", "transformers", "datasets", "deepspeed", *(("peft",) if more else ())),
        loss=r"'eval_loss': '?([0-9.]+)",
        loss_of="held out",
        steps=_STEPS,
        sha256="310f4eb5f750",
        method=method,
        deepspeed=_deepspeed(stage),
    )  # fmt: skip


def _nanogpt(ranks: int, method: dict[str, Any]) -> Row:
    return Row(
        name=f"nanogpt-2x{ranks}",
        framework="nanoGPT",
        tree=NANOGPT,
        script="train.py",
        engine="PyTorch, DDP",
        ranks=ranks,
        arguments=(
            "--backend=gloo", "--device=cpu", "--dtype=float32", "--compile=False",
            "--dataset={data}/tokens_{cluster_id}", "--out_dir={out}/{cluster_id}", "--n_layer=2",
            "--n_head=2", "--n_embd=64", "--block_size=64", "--batch_size=8",
            "--gradient_accumulation_steps={accumulation}", f"--max_iters={_STEPS - 1}",
            f"--eval_interval={_STEPS // 2}", "--eval_iters=20", "--log_interval=10",
            "--warmup_iters=5", "--learning_rate=3e-3", f"--lr_decay_iters={_STEPS}",
        ),
        prepared="tokens",
        packages=(),
        loss=r"iter 30: loss ([0-9.]+)",
        loss_of="training, step 31; mean",
        steps=_STEPS,
        sha256="413bd97b40bb",
        method=method,
        shim="cuda_is_cpu",
        directory=".",
        drawn_twice=0.01,
    )  # fmt: skip


def _torchtitan(ranks: int, engine: str) -> Row:
    return Row(
        name=f"torchtitan-2x{ranks}",
        framework="torchtitan",
        tree=TORCHTITAN,
        script="torchtitan.train",
        engine=engine,
        ranks=ranks,
        arguments=(
            "--job.config_file", "torchtitan/models/llama3/train_configs/debug_model.toml",
            "--training.dataset_path", "{data}/documents_{cluster_id}",
            "--training.steps", str(_STEPS), "--training.seq_len", "128",
            "--training.local_batch_size", "4", "--training.mixed_precision_param", "float32",
            "--job.dump_folder", "{out}/{cluster_id}", "--metrics.disable_color_printing",
            "--metrics.log_freq", "10",
        ),
        prepared="documents",
        packages=("torchdata", "datasets", "tyro", "triton"),
        loss=rf"step: {_STEPS}\s+loss:\s+([0-9.]+)",
        loss_of=f"training, step {_STEPS}; mean",
        steps=_STEPS,
        sha256="af6016fac5b2",
        method=_DILOCO,
        shim="torchtitan_on_cpu",
        directory=".",
    )  # fmt: skip


def _complete_nlp() -> Row:
    return Row(
        name="complete_nlp-2x2",
        framework="Accelerate",
        tree=ACCELERATE,
        script="examples/complete_nlp_example.py",
        engine="PyTorch, DDP",
        ranks=2,
        arguments=("--cpu", "--output_dir", "{out}"),
        prepared="pairs",
        packages=("accelerate", "transformers", "datasets", "evaluate"),
        loss=r"epoch 2: .*'accuracy': (?:np\.float64\()?([0-9.]+)",
        loss_of="accuracy, held out, cluster 0",
        steps=360,  # of 16 samples on each rank, the script says
        sha256="5e76c87dd371",
        method=_DILOCO,
        epochs=3,
    )


def _clm_by_accelerate(name: str, engine: str, ranks: int, stage: int | None) -> Row:
    environ = plain_environ = {"ACCELERATE_USE_CPU": "true"}
    config = None
    if stage is not None:
        config = _deepspeed(stage)
        del config["optimizer"]  # the script makes its own, or asks for a schedule in there, too
        del config["gradient_clipping"]
        environ = {
            "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "{json}"
        }  # fmt: skip
    return Row(
        name=f"accelerate-clm-{name}-2x{ranks}",
        framework="Accelerate",
        tree=ACCELERATE,
        script="examples/by_feature/deepspeed_with_config_support.py",
        engine=engine,
        ranks=ranks,
        arguments=(
            "--config_name", "{data}/gpt2", "--tokenizer_name", "{data}/gpt2",
            "--train_file", "{data}/train.txt", "--validation_file", "{data}/validation.txt",
            "--block_size", "64", "--per_device_train_batch_size", "4", "--seed", "0",
            "--per_device_eval_batch_size", "8", "--max_train_steps", str(_STEPS),
            "--learning_rate", "1e-3", "--lr_scheduler_type", "constant",
            "--output_dir", "{out}/trained",
        ),
        prepared="language_model",
        packages=(
            "accelerate", "transformers", "datasets", *(() if stage is None else ("deepspeed",))
        ),
        loss=r"Best model metrics: perplexity: \S+ eval_loss: ([0-9.]+)",
        loss_of="held out",
        steps=_STEPS,
        sha256="98956156724e",
        method=_DILOCO,
        deepspeed=config,
        environ=environ,
        plain_environ=plain_environ,
        plain_engine="PyTorch, DDP",
    )  # fmt: skip


def _lightning(strategy: str, engine: str, ranks: int, shim: str = "") -> Row:
    trainer = {
        "accelerator": "cpu", "devices": "{ranks}", "strategy": strategy, "max_steps": str(_STEPS),
        "limit_test_batches": "10", "default_root_dir": "{out}", "enable_progress_bar": "False",
    }  # fmt: skip
    return Row(
        name=f"lightning-{strategy}-2x{ranks}",
        framework="Lightning",
        tree=LIGHTNING,
        script="examples/pytorch/basics/transformer.py",
        engine=engine,
        ranks=ranks,
        arguments=(),
        prepared="words",
        packages=("lightning", *(("deepspeed",) if "deepspeed" in strategy else ())),
        loss=r"test_loss\s+\S?\s+([0-9.]+)",
        loss_of="held out",
        steps=_STEPS,
        sha256="417e7ceb2e06",
        method=_DILOCO,
        shim=shim,
        environ={f"PL_TRAINER_{name.upper()}": value for name, value in trainer.items()},
    )


ROWS = (
    _run_clm(2, 1, _DILOCO),
    _run_clm(2, 2, _STREAMING),
    _run_clm(3, 2, _DILOCO),
    _sft(2, 1, (), "", _DILOCO),
    _sft(2, 2, ("--use_peft", "--lora_target_modules", "c_attn", "c_proj"), " with LoRA", _DILOCO),
    _nanogpt(1, _DILOCO),
    _nanogpt(2, _DILOCO),
    _torchtitan(1, "PyTorch, one rank"),
    _torchtitan(2, "PyTorch, FSDP2"),
    _complete_nlp(),
    _clm_by_accelerate("ddp", "PyTorch, DDP", 2, None),
    _clm_by_accelerate("zero2", "DeepSpeed, ZeRO 2", 2, 2),
    _lightning("auto", "PyTorch, one rank", 1),
    _lightning("ddp", "PyTorch, DDP", 2),
    _lightning("deepspeed_stage_2", "DeepSpeed, ZeRO 2", 2, "lightning_deepspeed_on_cpu"),
)
