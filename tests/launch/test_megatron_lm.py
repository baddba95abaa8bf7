"""Unmodified `pretrain_gpt.py` of a Megatron-LM tree, on the CPU: `--megatron-lm=PATH -m slow`.

The tree is copied without its history; nothing is written into it. It needs what that release
imports: triton, pyyaml, regex, six (its requirements), and a compiled `helpers_cpp`, which
megatron-core's wheel brings.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.data.test_windows import write_indexed
from tests.distributed import free_port
from tests.launch.megatron_lm_ranks import ForkedRanks, launched

BIN = Path(sys.executable).parent
DRIVER = Path(__file__).with_name("megatron_lm_on_cpu.py")
ROOT = Path(__file__).parents[2]
DEADLINE = 400.0  # seconds of one run
FORKED: dict[Path, ForkedRanks] = {}  # by tree, with --forked-ranks
STEPS, SAVED_AT = 12, 7  # a step at which a fragment is under way
MODEL = shlex.split("""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 8 --lr 0.01 --min-lr 0.001
    --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 4222
    --transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --no-persist-layer-norm --attention-dropout 0 --hidden-dropout 0 --eval-iters 0
    --eval-interval 100 --log-interval 1 --num-workers 0 --split 99,1,0
""")
DSX = shlex.split("""
    --dsx-preset streaming_diloco --dsx-schedule-interval 4 --dsx-delay-steps 1
    --dsx-fragments-num-fragments 2 --dsx-deadline-seconds 120
""")
PIPELINE = ["--bf16", "--pipeline-model-parallel-size", "2"]
MUON = ["--optimizer", "muon", "--muon-tp-mode", "duplicated"]
SHARDED = ["--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce",
           "--overlap-param-gather"]  # fmt: skip
EXPERTS = shlex.split("""
    --bf16 --num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear --moe-router-topk 2
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 0.01
""")


@pytest.fixture(scope="module")
def tree(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    given = request.config.getoption("--megatron-lm")
    if given is None:
        pytest.skip("no Megatron-LM tree: give one with --megatron-lm=PATH")
    copy = tmp_path_factory.mktemp("megatron_lm") / "tree"
    shutil.copytree(given, copy, ignore=shutil.ignore_patterns(".git", "tests", "docs"))
    found = importlib.util.find_spec("megatron.core")  # not imported: the ranks do
    assert found and found.submodule_search_locations
    wheel = Path(found.submodule_search_locations[0]) / "datasets"
    for compiled in wheel.glob("helpers_cpp*.so"):
        shutil.copy(compiled, copy / "megatron/core/datasets")
    # spawned checkpoint writers import Megatron without install()
    (copy / "sitecustomize.py").write_text(
        "import typing\nif not hasattr(typing, 'override'): typing.override = lambda f: f\n"
    )
    if request.config.getoption("--forked-ranks"):
        FORKED[copy] = ForkedRanks(DRIVER, copy, environment(copy))
    yield copy
    if copy in FORKED:
        FORKED.pop(copy).close()


def environment(tree: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "DS_ACCELERATOR": "cpu",
    }


def pretrain(
    tree: Path,
    out: Path,
    *arguments: str,
    clusters: int = 2,
    ranks: int = 2,
    must_fail: bool = False,
    script: str = "pretrain_gpt.py",
) -> list[str]:
    """Run every cluster's own launcher; return their outputs."""
    out.mkdir(parents=True, exist_ok=True)
    rendezvous = f"127.0.0.1:{free_port()}"
    logs = [out / f"cluster_{m}.log" for m in range(clusters)]
    started: list[tuple[list[str], Path]] = []
    for cluster, log in enumerate(logs):
        own = ["--dsx-num-clusters", str(clusters), "--dsx-cluster-id", str(cluster)]
        own += ["--dsx-rendezvous", rendezvous, *DSX, *MODEL, *arguments]
        started.append(([str(tree / script), *own], log))
    if tree in FORKED:
        codes = FORKED[tree].run(started, ranks, environment(tree), DEADLINE)
    else:
        codes = launched(DRIVER, started, ranks, environment(tree), DEADLINE)
    texts = [log.read_text() for log in logs]
    assert any(codes) == must_fail, "\n".join(text[-3000:] for text in texts)
    return texts


FINDS_MUON = """
import importlib, typing
if not hasattr(typing, "override"): typing.override = lambda method: method
from dsx.bench.megatron_on_cpu import install; install()
for name in ("muon", "emerging_optimizers"):  # up to 0.17, and from 0.18
    try: module = importlib.import_module(f"megatron.core.optimizer.{name}")
    except ModuleNotFoundError: continue
    print("found" if getattr(module, "HAVE_EMERGING_OPTIMIZERS", False) else "")
"""


def require_muon(tree: Path) -> None:
    """Skip unless the tree finds the Emerging-Optimizers that it was written for."""
    asked = subprocess.run(
        [sys.executable, "-c", FINDS_MUON], env=environment(tree), capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    if "found" not in asked.stdout:
        pytest.skip(f"this tree's Emerging-Optimizers are not here; {asked.stderr[-300:]}")


def logged(text: str, what: str) -> dict[int, float]:
    """Return what Megatron logged of every iteration."""
    found = re.findall(rf"iteration\s+(\d+)/.*?\| {what}: ([\d.E+-]+)", text)
    return {int(iteration): float(value) for iteration, value in found}


def vocabulary(tree: Path) -> int:
    """Return how many tokens MODEL's tokenizer has in a tree."""
    release = (tree / "megatron/core/package_info.py").read_text()
    found = dict(re.findall(r"^(MAJOR|MINOR) = (\d+)$", release, re.M))
    # from core 0.18 on the end of a document is one of them, and not one more
    return 4222 + ((int(found["MAJOR"]), int(found["MINOR"])) < (0, 18))


def anchors(checkpoints: Path, iteration: int, clusters: int = 2) -> list[dict[str, torch.Tensor]]:
    """Return every cluster's anchors at an iteration, by rank file and name."""
    found: list[dict[str, torch.Tensor]] = []
    for cluster in range(clusters):
        own: dict[str, torch.Tensor] = {}
        state = checkpoints / f"{cluster}/dsx/cluster_{cluster}/iter_{iteration:07d}"
        for file in sorted(state.rglob("*.safetensors")):
            tensors = load_file(file)
            own |= {f"{file.name}/{n}": t for n, t in tensors.items() if "anchor" in n}
        found.append(own)
    return found


def require_equal_anchors(checkpoints: Path, iteration: int) -> None:
    first, second = anchors(checkpoints, iteration)
    assert first and first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)
    assert any(tensor.any() for tensor in first.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["pipeline", "sharded", "muon", "experts"])
def test_an_unmodified_script_trains_and_resumes(tree: Path, tmp_path: Path, kind: str) -> None:
    if kind == "muon":
        require_muon(tree)
    save = ["--save", str(tmp_path / "{cluster_id}"), "--save-interval", str(SAVED_AT)]
    if kind == "sharded":
        arguments = [*SHARDED, "--train-iters", str(SAVED_AT), *save]
        texts = pretrain(tree, tmp_path / "logs", *arguments)
        require_equal_anchors(tmp_path, SAVED_AT)
        # without apex or TransformerEngine, later releases cannot load what they have saved here
    else:
        inner = MUON if kind == "muon" else []
        layout = EXPERTS if kind == "experts" else PIPELINE
        arguments = [*layout, *inner, "--train-iters", str(STEPS), *save]
        texts = pretrain(tree, tmp_path / "logs", *arguments)
        require_equal_anchors(tmp_path, SAVED_AT)
        require_equal_anchors(tmp_path, STEPS)
        for cluster in range(2):
            latest = tmp_path / str(cluster) / "latest_checkpointed_iteration.txt"
            latest.write_text(str(SAVED_AT))
        load = ["--load", str(tmp_path / "{cluster_id}")]
        resumed = pretrain(tree, tmp_path / "resumed", *arguments, *load)
        for whole, part in zip(texts, resumed, strict=True):
            assert "goes on from iteration 7" in part
            before, after = logged(whole, "grad norm"), logged(part, "grad norm")
            assert sorted(after) == list(range(SAVED_AT + 1, STEPS + 1))
            assert after == {i: before[i] for i in after}
            before, after = logged(whole, "lm loss"), logged(part, "lm loss")
            same = [i for i in after if i != SAVED_AT + 2]  # Megatron's first log is not reset
            assert [after[i] for i in same] == [before[i] for i in same]
        require_equal_anchors(tmp_path, STEPS)
    losses = [logged(text, "lm loss") for text in texts]
    assert losses[0][1] != losses[1][1]  # samples of their own
    for of_cluster in losses:
        last = max(of_cluster)
        assert of_cluster[last] < of_cluster[1]
    assert re.search(r"dsx_preset \.+ streaming_diloco", texts[0])  # in the dump of arguments
    assert "finished after" in texts[0]


BLOCKING = shlex.split("--dsx-preset diloco --dsx-schedule-interval 4 --dsx-deadline-seconds 120")
VALIDATING = shlex.split("--train-iters 8 --eval-iters 2 --eval-interval 4")


def validated(text: str) -> list[str]:
    """Return what was printed of validation losses, line by line."""
    return re.findall(r"validation loss at (.*? \| lm loss value: \S+)", text)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_equal_weights_have_equal_losses_of_the_same_tokens(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "DSX", [*BLOCKING, "--dsx-validation", "both"])
    texts = pretrain(tree, tmp_path, *VALIDATING, ranks=1)
    first, second = map(validated, texts)
    assert first == second and len(first) == 8  # at steps 4 and 8, of both sets, each twice
    for own, average in zip(first[::2], first[1::2], strict=True):
        assert "(average of the clusters)" in average
        assert own.split("value: ")[1] == average.split("value: ")[1]  # right after a sync
    for cluster, text in enumerate(texts):
        part = f"of every 2 parts of its samples this cluster reads part {cluster + 1}; 64 samples"
        assert f"training data: --mock-data, shared by all clusters: {part}" in text
        assert "validation data: --mock-data, the same samples in all clusters" in text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_data_of_its_own_is_read_whole(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cluster in range(2):
        tokens = [[(7 * i + j + cluster) % 4000 for j in range(200)] for i in range(20)]
        write_indexed(tmp_path / f"data_{cluster}", tokens)
    monkeypatch.setitem(globals(), "DSX", BLOCKING)
    monkeypatch.setitem(globals(), "MODEL", [word for word in MODEL if word != "--mock-data"])
    data = ["--data-path", f"{tmp_path}/data_{{cluster_id}}", "--split", "80,20,0"]
    data += ["--data-cache-path", f"{tmp_path}/cache_{{cluster_id}}"]
    texts = pretrain(tree, tmp_path / "logs", *VALIDATING, *data, ranks=1)
    for cluster, text in enumerate(texts):
        assert re.search(rf"training data: \S+/data_{cluster} \(4,000 tokens\), of this", text)
        assert re.search(r"validation data: .* losses of different clusters do not compare", text)
        assert re.search(r"^ +train: +64$", text, re.M)  # and not of both clusters


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_clusters_of_other_arguments_are_refused(tree: Path, tmp_path: Path) -> None:
    differ = ["--train-iters", "4", "--clip-grad", "1.{cluster_id}"]
    texts = pretrain(tree, tmp_path / "refused", *differ, ranks=1, must_fail=True)
    for text in texts:
        assert "arguments.clip_grad: cluster 0 has 1.0, cluster 1 has 1.1;" in text
    pretrain(tree, tmp_path / "meant", *differ, "--dsx-may-differ", "arguments.clip_grad", ranks=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_missing_outer_state_is_an_error(tree: Path, tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "{cluster_id}"), "--save-interval", "4"]
    arguments = [*PIPELINE, "--train-iters", "8", *save]
    pretrain(tree, tmp_path / "logs", *arguments, "--exit-interval", "4")
    shutil.rmtree(tmp_path / "1/dsx/cluster_1")
    load = ["--load", str(tmp_path / "{cluster_id}")]
    texts = pretrain(tree, tmp_path / "again", *arguments, *load, must_fail=True)
    assert "iter_0000004" in texts[1]
    assert re.search(r"(FileNotFound|Value)Error", texts[1])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--save", "{tmp}/{cluster_id}", "--save-interval", "4"]
            + ["--non-persistent-ckpt-type", "global", "--non-persistent-save-interval", "2"],
            "dsx does not serve --non-persistent-save-interval of Megatron",
        ),
        (["--skip-train"], "dsx does not serve --skip-train of Megatron"),
        (["--optimizer", "dist_muon"], "dsx does not serve --optimizer dist_muon of Megatron"),
        (
            ["--save", "{tmp}/same", "--save-interval", "4"],
            "give every cluster a directory of its own",
        ),
    ],
    ids=["non-persistent", "skip-train", "dist-muon", "same-save"],
)
def test_what_is_refused_is_named(
    tree: Path, tmp_path: Path, arguments: Sequence[str], said: str
) -> None:
    filled = [text.replace("{tmp}", str(tmp_path)) for text in arguments]
    texts = pretrain(
        tree, tmp_path / "logs", *PIPELINE, "--train-iters", "4", *filled, must_fail=True
    )
    assert any(said in text for text in texts), texts[0][-3000:]
    for text in texts:
        assert "number of parameters on (tensor, pipeline)" not in text  # nothing has been built


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_flags_are_in_megatrons_help(tree: Path) -> None:
    shown = subprocess.run(
        [sys.executable, DRIVER, tree / "pretrain_gpt.py", "--help"],
        env=environment(tree), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert "--dsx-schedule-interval" in shown.stdout
    if "unsupported format character" in shown.stderr:  # a % in a help text of this tree's own
        assert "megatron_patches: these are the flags of dsx alone" in shown.stderr
        assert "Traceback" not in shown.stderr
    else:
        assert "--num-layers" in shown.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_a_flag_of_dsx_it_is_plain_megatron(tree: Path) -> None:
    launcher = [BIN / "torchrun", "--nproc-per-node", "1", "--master-port", str(free_port())]
    plain = subprocess.run(
        [*launcher, DRIVER, tree / "pretrain_gpt.py", *MODEL, "--train-iters", "2"],
        env=environment(tree), capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert plain.returncode == 0, plain.stderr[-3000:]
    assert plain.stdout.count("no --dsx-* flag is given: plain Megatron") == 1
    assert sorted(logged(plain.stdout, "lm loss")) == [1, 2]
    assert "dsx [cluster" not in plain.stdout and "dsx_preset" not in plain.stdout
