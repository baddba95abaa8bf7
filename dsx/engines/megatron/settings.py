"""What of Megatron clusters compare: its arguments, or where there are none its configurations.

Everything is compared but what belongs to a site: paths, ports, what is logged, saved and profiled,
how the work is laid out on the hardware, and where a run is. A tokenizer is compared by its files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch, translate
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dsx.engines.settings import plain, settings_of_modules

NOT_COMPARED = (
    "dsx_*",  # compared on its own
    # paths and places
    "*_dir", "*_path", "*_file", "*_filename", "load", "save", "*_load", "yaml_cfg", "*_port",
    # what is logged and watched
    "log_*", "*_logging", "logging_level", "tensorboard_*", "wandb_*", "one_logger_*",
    "*_one_logger", "otel_*", "app_tag_*", "timing_*", "profile*", "*profiler*",
    "record_shapes", "nvtx_ranges", "flight_recorder_*", "run_workload_*", "filter_warnings",
    "set_level_for_all_loggers", "throughput_window_size", "*record_memory_history",
    "*straggler*", "check_weight_hash_*", "config_logger*",
    # when and how a site saves, loads, stops and restarts; where a run is
    "save_*", "no_save_*", "no_load_*", "*ckpt*", "async_*", "non_persistent_*",
    "use_mp_args_from_checkpoint_args", "use_checkpoint_args",
    "use_tokenizer_model_from_checkpoint_args", "pretrained_checkpoint", "checkpoint_activations",
    "*persistent_save*", "exit_*", "adlr_*", "inprocess_*", "ft_*", "*ft_package", "calc_ft_*",
    "rerun_*", "iteration", "curr_iteration", "consumed_*", "skipped_train_samples", "finetune",
    "perform_*", "do_train", "do_valid", "do_test", "num_floating_point_operations_so_far",
    # the hardware, and how the work is laid out on it: what has to be equal of that is a fact
    "rank", "local_rank", "world_size", "micro_batch_size", "num_workers", "num_dataset_builder_*",
    "*timeout*", "*nccl*", "*sharp*", "high_priority_*", "use_ring_exchange*", "lazy_mpu_init",
    "manual_gc*", "empty_unused_memory_level", "recompute_*", "distribute_saved_activations",
    "*cuda_graph*", "*cpu_offload*", "*_offload_*", "ddp_bucket_size", "ddp_num_buckets",
    "overlap_*", "tp_comm_*", "align_*", "*delay_wgrad*", "*_fusion", "attention_backend",
    "use_flash_attn", "dataloader_fast_*", "dataloader_defer_*", "mmap_bin_files", "inference_*",
    "rl_*", "langrl_*",
)  # fmt: skip
_NOT_COMPARED = re.compile("|".join(map(translate, NOT_COMPARED)))
_TOKENIZERS = ("vocab_file", "merge_file", "tokenizer_model")
_OF_TOKENIZER = ("*token*", "vocab*", "merges*", "*.model", "*.spm")  # in a folder


def settings_of_arguments(arguments: Any) -> dict[str, Any]:
    """Return what is compared of Megatron-LM's arguments, a tokenizer's files as their digest."""
    values = plain(vars(arguments))
    compared = {
        name: value for name, value in sorted(values.items()) if not _NOT_COMPARED.match(name)
    }
    for name in _TOKENIZERS:
        if values.get(name):
            compared[name] = digest_of(str(values[name]))
    return compared


def settings_of_configs(chunks: Sequence[Any], optimizer: Any) -> dict[str, Any]:
    """Return what is compared where a script on megatron-core has no such arguments."""
    from dsx.engines.megatron.masters import leaves

    def compared(config: Any) -> dict[str, Any]:
        values = plain(vars(config)) if config is not None else {}
        return {name: value for name, value in values.items() if not _NOT_COMPARED.match(name)}

    modules = [(f"chunk_{i}.{n}", m) for i, c in enumerate(chunks) for n, m in c.named_modules()]
    return {
        "optimizer": compared(next((leaf.config for leaf in leaves(optimizer)), None)),
        "transformer": compared(chunks[0].config),
        "model": settings_of_modules(modules),
    }


def digest_of(place: str) -> str:
    """Return the digest of a file, or of a folder's tokenizer files; another name as it is."""
    path = Path(place)
    found = sorted(path.iterdir()) if path.is_dir() else []
    files = [f for f in found if any(fnmatch(f.name, pattern) for pattern in _OF_TOKENIZER)]
    files = [path] if path.is_file() else [file for file in files if file.is_file()]
    if not files:
        return place
    hasher = blake2b(digest_size=8)
    for file in files:
        hasher.update(str(file.relative_to(path)).encode() + b"\0")
        hasher.update(blake2b(file.read_bytes()).digest())
    return f"of digest {hasher.hexdigest()}"
