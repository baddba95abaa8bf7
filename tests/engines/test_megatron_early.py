"""What is refused, shown or left alone before clusters meet; on stand-ins of a tree's modules."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import megatron_patches
from dsx.comm.cluster_world import backend_of_world
from dsx.engines.megatron import refusals
from dsx.engines.megatron.refusals import refuse_arguments
from megatron_patches import model_and_optimizer, probe
from megatron_patches.__main__ import main
from megatron_patches.run import Run

DSX = ["--dsx-preset", "diloco", "--dsx-num-clusters", "2", "--dsx-cluster-id", "1"]
NAMES = ("arguments", "initialize", "training", "global_vars")
SWITCHES = (
    "optimizer_cuda_graph", "inprocess_restart", "use_custom_fsdp", "hybrid_context_parallel",
    "skip_train",
    "overlap_param_gather_with_optimizer_step", "optimizer_cpu_offload", "fp8_param_gather",
    "reuse_grad_buf_for_mxfp8_param_ag", "use_layer_wise_distributed_optimizer",
)  # fmt: skip
VALUES = {
    "non_persistent_save_interval": 5,
    "num_distributed_optimizer_instances": 2,
}
OPTIM = ["--data-parallel-sharding-strategy", "optim"]


class Joining(Exception):
    """The clusters would be waited for now."""


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Run it, to be refused as a command refuses; return the one line it says."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The modules of a Megatron-LM tree that are looked up first; joining is an exception."""
    modules = {name: ModuleType(f"megatron.training.{name}") for name in NAMES}

    def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Any:
        parser = argparse.ArgumentParser(prog="megatron", allow_abbrev=False)
        for name in SWITCHES:
            parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
        for name in VALUES:
            parser.add_argument(f"--{name.replace('_', '-')}", type=int)
        sizes = "context-parallel pipeline-model-parallel expert-model-parallel"
        for name in [*sizes.split(), "expert-tensor-parallel"]:
            parser.add_argument(f"--{name}-size", type=int, default=1)
        parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
        parser.add_argument("--num-experts", type=int)
        for name in ("use-torch-fsdp2", "use-precision-aware-optimizer", "no-save-optim"):
            parser.add_argument(f"--{name}", action="store_true")
        parser.add_argument("--save")
        parser.add_argument("--ckpt-format", default="torch_dist")
        parser.add_argument("--use-megatron-fsdp", action="store_true")
        parser.add_argument("--data-parallel-sharding-strategy", default="no_shard")
        parser.add_argument("--optimizer", default="adam")
        parser.add_argument("--use-distributed-optimizer", action="store_true")
        parser.add_argument("--muon-scalar-optimizer", default="adam")
        parser.add_argument("--clip-grad", type=float, help=modules["arguments"].help_of_clip)
        parser.add_argument("--distributed-backend", default=backend_of_world())
        if extra_args_provider is not None:
            parser = extra_args_provider(parser)
        return parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()

    modules["arguments"].help_of_clip = "the norm"
    modules["arguments"].parse_args = parse_args
    modules["initialize"].parse_args = parse_args
    for name, made in modules.items():
        monkeypatch.setitem(sys.modules, f"megatron.training.{name}", made)
    package = ModuleType("megatron")
    package.training = ModuleType("megatron.training")
    monkeypatch.setitem(sys.modules, "megatron", package)
    monkeypatch.setitem(sys.modules, "megatron.training", package.training)

    def join(arguments: Any) -> Run:
        raise Joining

    monkeypatch.setattr(Run, "join", join)
    # the only wrap that imports megatron.core, which takes seconds
    monkeypatch.setitem(sys.modules, "megatron_patches.checkpoint", ModuleType("checkpoint"))
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    return modules


@pytest.fixture
def script(tmp_path: Path) -> str:
    """What a pretraining script does as far as its command line goes."""
    path = tmp_path / "pretrain_gpt.py"
    path.write_text(
        "import sys\nfrom megatron.training.arguments import parse_args\n"
        "def provide(parser):\n    parser.add_argument('--my-own')\n    return parser\n"
        "args = parse_args(provide)\nprint('ran with', sys.argv[1:], args.my_own)\n"
    )
    return str(path)


def test_without_a_flag_of_dsx_nothing_is_patched(
    tree: dict[str, ModuleType], script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {name: {**vars(made)} for name, made in tree.items()}
    main([script, "--optimizer", "muon", "--my-own", "x"])
    after = {name: {**vars(made)} for name, made in tree.items()}
    for name, attributes in before.items():
        assert after[name].keys() == attributes.keys()
        assert all(after[name][key] is value for key, value in attributes.items())
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "megatron_patches: no --dsx-* flag is given: plain Megatron, nothing is patched",
        "ran with ['--optimizer', 'muon', '--my-own', 'x'] x",
    ]


def test_one_rank_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    megatron_patches.apply(["--lr", "1"])
    assert capsys.readouterr().out == ""


def test_a_cluster_s_number_without_clusters_is_refused(
    tree: dict[str, ModuleType], script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(capsys, [script, "--my-own", "checkpoints/{cluster_id}"])
    assert "checkpoints/{cluster_id} has a cluster's number in" in told


@pytest.mark.parametrize(
    "given",
    [
        *[[f"--{name.replace('_', '-')}"] for name in SWITCHES],
        *[[f"--{name.replace('_', '-')}", str(value)] for name, value in VALUES.items()],
        ["--optimizer", "dist_muon"],
        ["--optimizer", "adaptive_muon"],
        ["--use-distributed-optimizer", "--optimizer", "muon"],
        ["--muon-scalar-optimizer", "lion", "--optimizer", "muon"],
        ["--data-parallel-sharding-strategy", "no_shard", "--use-megatron-fsdp"],
        ["--use-megatron-fsdp", "--use-precision-aware-optimizer", *OPTIM],
        ["--expert-model-parallel-size", "2", "--use-torch-fsdp2"],
        ["--pipeline-model-parallel-size", "2", "--use-megatron-fsdp", *OPTIM],
        ["--pipeline-model-parallel-size", "2", "--use-torch-fsdp2"],
        ["--save", "x", "--use-torch-fsdp2"],
    ],
    ids=" ".join,
)
def test_what_is_not_served_is_refused_before_clusters_meet(
    tree: dict[str, ModuleType],
    script: str,
    given: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = refused(capsys, [script, *DSX, *given])
    assert told.startswith(f"megatron_patches: dsx does not serve {given[0]}")
    assert sys.argv == [script, *DSX, *given]


def test_another_backend_and_a_step_inside_the_backward_are_refused_there_too(
    tree: dict[str, ModuleType], script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "gloo" if backend_of_world() == "nccl" else "nccl"
    told = refused(capsys, [script, *DSX, "--distributed-backend", other])
    assert f"--distributed-backend {other}, but this cluster's" in told
    late = ["--dsx-schedule-when", "after"]
    told = refused(capsys, [script, "--dsx-preset", "dreamddp", *DSX[2:], *late])
    assert "dsx.schedule.when='after' takes a layer's optimizer step" in told


def test_what_is_served_goes_on_to_meet(tree: dict[str, ModuleType], script: str) -> None:
    given = ["--clip-grad", "1.{cluster_id}", "--my-own", "x", "--context-parallel-size", "2"]
    given += ["--num-experts", "8", "--expert-model-parallel-size", "2"]
    with pytest.raises(Joining):
        main([script, *DSX, *given])
    assert sys.argv == [script, *DSX, *given]
    with pytest.raises(Joining):
        main([script, *DSX, "--use-torch-fsdp2"])
    with pytest.raises(Joining):  # what is in that file is known where the model is built
        main([script, *DSX, "--yaml-cfg", "x.yaml", "--skip-train"])


def test_whole_experts_on_tensor_parallel_ranks_are_refused(
    tree: dict[str, ModuleType], script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron sums their gradients over data-parallel ranks alone."""
    given = ["--num-experts", "8", "--tensor-model-parallel-size", "2"]
    told = refused(capsys, [script, *DSX, *given, "--expert-tensor-parallel-size", "1"])
    assert "--expert-tensor-parallel-size 1 where every rank holds all experts" in told
    assert "use 2, as for dense layers" in told
    for served in (["--expert-model-parallel-size", "2"], ["--expert-tensor-parallel-size", "2"]):
        with pytest.raises(Joining):
            main([script, *DSX, *given, *served])


def test_every_argument_that_is_refused_is_tried_here() -> None:
    known = {*refusals.OF_LOOP, *refusals.OF_OPTIMIZER, *refusals.OF_DATA_PARALLEL}
    known |= {*refusals.OF_MODEL, *refusals.ABOVE_ONE}
    assert known == {*SWITCHES, *VALUES}
    refuse_arguments(SimpleNamespace(skip_train=False))  # a version without the others


def test_megatron_fsdp_is_served_though_it_sets_the_old_one_s_flag() -> None:
    given = SimpleNamespace(use_megatron_fsdp=True, use_custom_fsdp=True)
    for given.data_parallel_sharding_strategy in refusals.SHARDING:
        refuse_arguments(given)


@pytest.mark.parametrize("name", ["save", "load"])
def test_fsdp2_s_optimizer_is_not_in_torch_dist(name: str) -> None:
    """Neither is it where the optimizer is left out."""
    given = SimpleNamespace(use_torch_fsdp2=True, ckpt_format="torch_dist", **{name: "x"})
    told = f"--{name} with --use-torch-fsdp2 and --ckpt-format torch_dist.* torch_dcp.*-{name}-opt"
    with pytest.raises(ValueError, match=told):
        refuse_arguments(given)
    given = SimpleNamespace(**{**vars(given), "ckpt_format": "torch_dcp"})
    refuse_arguments(given)
    given.optimizer = "sgd"
    with pytest.raises(ValueError, match=f"--{name} with --use-torch-fsdp2 and --optimizer sgd"):
        refuse_arguments(given)
    refuse_arguments(SimpleNamespace(**vars(given), **{f"no_{name}_optim": True}))
    refuse_arguments(SimpleNamespace(**{**vars(given), "use_torch_fsdp2": False}))


@pytest.mark.parametrize("name", ["save", "load"])
def test_megatron_fsdp_s_optimizer_has_state_of_all(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Transformer Engine's Adam, or one of torch's; others would let ranks wait at a save."""
    served = {"adam": ["", "transformer_engine", "transformer_engine apex"], "sgd": [""]}
    for optimizer, packages in served.items():
        given = SimpleNamespace(use_megatron_fsdp=True, optimizer=optimizer, **{name: "x"})
        for found in ("", "apex", "transformer_engine", "transformer_engine apex"):
            monkeypatch.setattr(refusals, "find_spec", {p: p for p in found.split()}.get)
            refuse_arguments(SimpleNamespace(**vars(given), **{f"no_{name}_optim": True}))
            if found in packages:
                refuse_arguments(given)
                continue
            told = f"--{name} with --use-megatron-fsdp and --optimizer {optimizer} of Megatron"
            with pytest.raises(ValueError, match=told):
                refuse_arguments(given)


def test_a_load_of_weights_alone_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "find_spec", lambda package: package)
    for kind in ("use_torch_fsdp2", "use_megatron_fsdp"):
        given = {kind: True, "ckpt_format": "torch_dist", "load": "x", "finetune": True}
        refuse_arguments(SimpleNamespace(**given, optimizer="sgd"))


def test_the_second_line_is_before_the_model(
    tree: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script's defaults and a checkpoint's arguments are in force only there."""
    built: list[str] = []
    tree["training"].setup_model_and_optimizer = lambda model_type: built.append("model")
    in_force = SimpleNamespace(distributed_backend="gloo", save="same", skip_train=True)
    tree["global_vars"].get_args = lambda: in_force
    monkeypatch.setattr(model_and_optimizer.dist, "get_backend", lambda: "gloo")

    def claim_directory(run: Any, save: str) -> None:
        raise ValueError(f"{save} is where another cluster saves")

    monkeypatch.setattr(model_and_optimizer, "claim_directory", claim_directory)
    model_and_optimizer.patch(SimpleNamespace(handle=None))  # type: ignore[arg-type]
    setup = probe.training().setup_model_and_optimizer
    for message, changes in {
        "does not serve --skip-train": {},
        "--distributed-backend nccl, but": {"skip_train": False, "distributed_backend": "nccl"},
        "same is where another cluster saves": {"distributed_backend": "gloo"},
    }.items():  # fmt: skip
        vars(in_force).update(changes)
        with pytest.raises(ValueError, match=message):
            setup("gpt")
    assert built == []


def test_megatrons_help_has_the_flags_of_dsx(
    tree: dict[str, ModuleType], script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([script, "--help"])
    shown = capsys.readouterr()
    assert ended.value.code == 0 and shown.err == ""
    assert "--dsx-schedule-interval" in shown.out and "--my-own" in shown.out


def test_where_megatrons_help_fails_the_flags_of_dsx_are_shown(
    tree: dict[str, ModuleType], script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tree["arguments"].help_of_clip = "the norm (100%)"
    main([script, *DSX, "--help"])
    shown = capsys.readouterr()
    assert "--dsx-schedule-interval" in shown.out and "--clip-grad" not in shown.out
    (line,) = shown.err.splitlines()
    assert "these are the flags of dsx alone" in line and "unsupported format character" in line


def test_where_there_is_no_tree_the_flags_of_dsx_are_shown(
    tree: dict[str, ModuleType],
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "megatron.training.arguments", None)
    main([script, "-h"])
    shown = capsys.readouterr()
    assert "--dsx-schedule-interval" in shown.out
    assert "megatron.training.arguments" in shown.err and shown.err.count("\n") == 1
