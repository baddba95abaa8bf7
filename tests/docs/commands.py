"""When each command of the pages runs; what is in no list runs in the default suite.

A key is the beginning of a command, or of a Python block. Every key has to match something.
"""

from __future__ import annotations

CI = {  # more than some seconds: `pytest -m ci`
    "bash scripts/setup.sh",
    "deepspeed --num_gpus 2 train.py",
    "deepspeed --num_gpus 2 --module dsx.run their_train.py",
    "dsx report runs/minimal",
    "torchrun --nproc-per-node 2 train_torch.py",
    "torchrun --nproc-per-node 2 train_two.py",
    "torchrun --nproc-per-node 4 train_ddp.py",
    "torchrun --nproc-per-node 4 train_fsdp.py",
    "torchrun --nproc-per-node 4 train_saving.py",
    "dsx data build",
    "dsx dry-run",
    "dsx data check",
    "dsx bench pseudo-gradients",
    "OMP_NUM_THREADS=1 dsx bench codec",
    "OMP_NUM_THREADS=1 dsx bench overhead",
    "dsx bench line --clusters 2 --mbit 22",
    "dsx bench line --mbit 100 -- python scripts/start_time.py",
    "dsx bench line --mbit 100 --latency-ms 20 -- python scripts/commit_time.py",
    "python scripts/vision.py",
    "python make_folder.py",
    "deepspeed --num_gpus 2 train_llama.py",
    "dsx export runs/llama",
    "from transformers import AutoModelForCausalLM",
}

SHORTER = {  # what `-m ci` takes instead of what is printed, and `-m slow` does not
    "OMP_NUM_THREADS=1 dsx bench codec": ("--repeats 40", "--repeats 2"),
    "dsx bench pseudo-gradients": ("--out", "--rounds 1 --out"),
}

SLOW = {  # whole trainings: `pytest -m slow`
    "bash scripts/quickstart.sh",
    "dsx quickstart --steps",
    "dsx report runs/quickstart",
    "dsx export runs/quickstart",
    "dsx export models/trained --megatron",
    "dsx dry-run configs/llama_70b_fp8.flags",
    "dsx dry-run configs/qwen_30b_a3b.flags",
    "dsx dry-run configs/llama_8b_128k.flags",
    "dsx dry-run docs/examples/pipeline_experts",
    "deepspeed --num_gpus 4 scripts/pretrain_gpt_deepspeed.py",
    "torchrun --nproc-per-node 4 scripts/pretrain_gpt_megatron.py",
    "python -m deepspeed.checkpoint.ds_to_universal",
    "OMP_NUM_THREADS=1 dsx bench cores",
    "dsx bench line --mbit 22 -- dsx net-test",
    "dsx bench line --mbit 20 -- deepspeed",
    "dsx bench line --clusters 2 --mbit 20 -- torchrun",
    "dsx trace runs/two_launchers",
    "dsx rendezvous --port 29400",
    "deepspeed --num_gpus 2 --master_port",
    "deepspeed --num_gpus 1 sync_train.py",
    "deepspeed --num_gpus 2 --module dsx.run sync_train.py",
}

_SITES = "needs what a site has; with stand-ins in tests/launch/test_where_it_runs.py"
_BY_HAND = "half an hour and more, by hand when the numbers are renewed; in small in "
_FOLDER = "some need the extra `clients`; as printed in tests/docs/test_example_folders.py"
_MEGATRON = "scripts/pretrain_gpt_megatron.py"
_SMALL = "some minutes; as printed in tests/docs/test_worked_examples.py"
_WATCH = "serves until it is ended; what it loads in tests/telemetry/test_monitoring.py"
_HOSTS = "needs two hosts; with namespaces in tests/launch/test_several_hosts.py"
NOT_HERE = {  # with the reason
    "bash scripts/gpu_check.sh": "needs a GPU; on the CPU in tests/bench/test_gpu.py",
    "for n in berlin oslo; do ip netns": "two sites in namespaces, as root",
    "for n in rome rome-router": "sites behind NAT, as root; in tests/launch/test_sites.py",
    "at=": "sites behind NAT, as root; in tests/launch/test_sites.py",
    "for n in rome paris; do": "sites behind NAT, as root; in tests/launch/test_sites.py",
    "done": "sites behind NAT, as root; in tests/launch/test_sites.py",
    "wg ": "a tunnel between two hosts, as root",
    "ip ": "two sites in namespaces, as root",
    "ip netns exec": "two sites in namespaces, as root",
    "dsx ctl ": "needs a run that goes on; with one in tests/launch/test_ctl.py",
    'pip install "dsx-train[wandb': "asked for by who has them; in tests/telemetry/exporters",
    'pip install "dsx-train[otel]"': "asked for by who has it; in tests/telemetry/exporters",
    'pip install "dsx-train[remote]"': "asked for by who has a bucket; in tests/checkpoint",
    "dsx trace runs/first": "a run of many ranks; tests/telemetry/trace/test_command.py has four",
    "dsx top runs/first": "a run that goes on; one in tests/telemetry/top/test_top.py",
    "ssh -t berlin dsx top": "another host; the command in tests/telemetry/top/test_top.py",
    "dsx notices ds.json": "somebody is told; with a server in tests/training/test_telling.py",
    "dsx agent ": "needs a site; with several in tests/launch/test_agent.py",
    "deepspeed --hostfile": _HOSTS,
    "torchrun --nnodes 2": _HOSTS,
    "torchrun --nnodes 4": _HOSTS,
    "torchrun --nnodes 8": _HOSTS,
    f"torchrun --nproc-per-node 4 {_MEGATRON} --dsx-config configs/small.json": _SMALL,
    f"torchrun --nproc-per-node 8 {_MEGATRON} --dsx-config configs/small.json": _SMALL,
    "dsx keys check ds.json": "needs a second site; with two in tests/comm/links/test_check.py",
    "torchrun --nproc-per-node 4 -m dsx.run --dsx-config docs/examples": _FOLDER,
    "deepspeed --num_gpus 4 --module dsx.run docs/examples": _FOLDER,
    "deepspeed --num_gpus 2 --module dsx.run docs/examples": _FOLDER,
    "dsx report runs/example_": _FOLDER,
    "source .venv/bin/activate": "changes the reader's shell; tests have the environment already",
    "export CUDA_VISIBLE_DEVICES": "changes the reader's shell; tests have the environment already",
    "bash scripts/test.sh": "runs this test",
    "dsx relay --keys": "serves until it is ended; as printed in tests/comm/links/test_relay.py",
    "dsx quickstart": "what scripts/quickstart.sh runs; by itself in tests/launch/test_install.py",
    "torchrun --nproc-per-node 8 -m megatron_patches": (
        "needs a Megatron-LM tree and eight GPUs; on the CPU in tests/launch/test_megatron_lm.py"
    ),
    "deepspeed --num_gpus 2 run_clm.py": (
        "needs transformers and a model; in tests/run/test_trainer_synchronous.py"
    ),
    "import megatron_patches": "needs a Megatron-LM tree; in tests/launch/test_megatron_lm.py",
    "dsx net-test --clusters 2 --cluster-id": "needs two hosts; on one in tests/link/",
    "dsx bench e2e": _BY_HAND + "tests/bench/test_e2e.py",
    "OMP_NUM_THREADS=1 dsx bench convergence": _BY_HAND + "tests/bench/test_convergence.py",
    "dsx bench paper ": _BY_HAND + "tests/bench/test_paper.py",
    "dsx bench examples --examples": _BY_HAND + "tests/bench/test_examples.py",
    "dsx bench guard": _BY_HAND + "tests/bench/test_wrong.py",
    "dsx bench engines": _BY_HAND + "tests/bench/test_engines.py",
    "bash scripts/matrix.sh": "installs other releases; what it does in tests/test_matrix.py",
    "dsx bench heal": _BY_HAND + "tests/bench/test_heal.py",
    "python scripts/dry_run_table.py": _BY_HAND + "tests/bench/test_dry_run_table.py",
    "dsx bench chaos": _BY_HAND + "tests/bench/test_chaos.py",
    "dsx bench start": _BY_HAND + "tests/bench/test_start.py",
    "dsx bench telemetry": _BY_HAND + "tests/bench/test_telemetry.py",
    "dsx bench links": _BY_HAND + "tests/bench/test_links.py",
    "dsx bench wall-clock": _BY_HAND + "tests/bench/test_wall_clock.py",
    "dsx bench torchft": _BY_HAND + "tests/bench/test_torchft.py",
    "deepspeed --num_gpus 2 scripts/pretrain_gpt_deepspeed.py --scaled-down": (
        "needs the quickstart's data; in tests/paper_configs/test_scaled_down.py"
    ),
    "torchrun --nproc-per-node 4 scripts/pretrain_gpt_megatron.py --scaled-down": (
        "needs the quickstart's data; in tests/paper_configs/test_scaled_down.py"
    ),
    'pip install "dsx-train[clients,deepspeed]" evaluate': "packages that nothing else here needs",
    "pip install torchft": "a package that nothing else here needs",
    "torchrun --nproc-per-node 4 -m dsx.run --dsx-config dsx.json train.py": (
        "any script; one in tests/run/test_plain_torch.py"
    ),
    "sbatch configs/launch": _SITES,
    "export DSX_": _SITES,
    "kubectl --context": _SITES,
    "docker ": _SITES,
    "docker compose -f configs/monitoring": _WATCH,
    "prometheus --config.file=": _WATCH,
    "dsx watch ": "serves until it is ended; in tests/telemetry/watch/test_server.py",
    "ssh -L ": "needs another host",
    "python scripts/watch_screenshots.py": "makes the pictures of a page, with a browser",
    'pip install "dsx-train[prometheus]"': "in the extra `dev`, too",
    "python -m build --wheel": _SITES,
    "bash configs/launch/ssh.sh": _SITES,
    "torchrun --nproc-per-node 4 -m dsx.run --dsx-config configs/minimal.json their_li": (
        "stands for a script of the reader's; in tests/run/test_lightning.py"
    ),
    "accelerate launch --use_deepspeed --deepspeed_config_file ds.json -m dsx.run complete_nlp": (
        "the script is Accelerate's example; tests/run/test_accelerate.py starts one of its form"
    ),
    "torchrun --nproc-per-node 8 -m dsx.run --dsx-config dsx.json complete_nlp_example.py": (
        "the script is Accelerate's example; tests/run/test_accelerate.py starts one of its form"
    ),
    "deepspeed --num_gpus 2 --module dsx.run run_clm.py": (
        "a script of the transformers repository; one like it in tests/run/test_trainer.py"
    ),
}

NEEDS_ROOT = {"dsx bench line"}  # skipped, with the testbed's own reason, where there is none

EXACT = {  # what they print is the same everywhere, and stands in the `text` block that follows
    "dsx dry-run configs/qwen_107b.flags",
    "dsx memory configs/qwen_107b.flags",
    "dsx dry-run configs/llama_70b_fp8.flags",
    "dsx memory configs/llama_70b_fp8.flags",
    "dsx dry-run configs/qwen_30b_a3b.flags",
    "dsx memory configs/qwen_30b_a3b.flags",
    "dsx dry-run configs/llama_8b_128k.flags",
    "dsx memory configs/llama_8b_128k.flags",
    "dsx memory docs/examples/pipeline_experts",
    "dsx dry-run docs/examples/pipeline_experts",
    "dsx plan --params 36.5e9",
    "dsx simulate",
    "dsx plan --megatron",
}

# They meet at the launchers' default port, so they run one at a time on a host.
RANKS = ("deepspeed ", "torchrun ")
LAUNCHES = (*RANKS, "bash scripts/quickstart.sh", "dsx quickstart")

PACKAGES = {  # pages whose commands need what `dev` does not install
    "docs/hugging-face-models.md": ("transformers",),
}

AFTER = {  # pages whose commands need what another page's have made
    "docs/watch.md": "docs/quickstart.md",
    "docs/checkpoints.md": "docs/quickstart.md",
}


def listed(command: str, names: object) -> bool:
    """Whether a command begins as one of the names."""
    return any(command.startswith(name) for name in names)  # type: ignore[attr-defined]


def shortened(command: str) -> str:
    """Return a command as `-m ci` runs it."""
    for name, (printed, taken) in SHORTER.items():
        if command.startswith(name):
            assert printed in command, f"SHORTER: no {printed} in {command}"
            return command.replace(printed, taken)
    return command


def level(command: str) -> str | None:
    """Return default, ci or slow, by the longest name that fits; None for what does not run."""
    lists = [(NOT_HERE, None), (SLOW, "slow"), (CI, "ci")]
    fitting = [(len(n), to) for names, to in lists for n in names if command.startswith(n)]
    return max(fitting, key=lambda found: found[0])[1] if fitting else "default"
