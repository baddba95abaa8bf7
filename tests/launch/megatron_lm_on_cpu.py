"""megatron_patches without a GPU: `torchrun ... megatron_lm_on_cpu.py pretrain_gpt.py ...`.

Beside what megatron-core needs (dsx/bench/megatron_on_cpu.py), the training loop asserts that CUDA
is there and compiles C++ helpers into its tree; here a compiled one is expected to be there.

`megatron_lm_on_cpu.py --serve TREE` imports the tree once and forks ranks from itself: each line of
stdin asks for one, as JSON with its `number`, `environment`, `arguments` and `log`. Lines of stdout
that begin with `rank: ` tell number, process and, once it has ended, status.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import importlib
import json
import multiprocessing.spawn
import os
import select
import signal
import sys
import traceback
import typing
from pathlib import Path
from typing import Any

import numpy
import torch

from dsx.bench import megatron_on_cpu

RANK = "rank: "  # begins what is told of one


def install() -> None:
    """Let an unmodified pretraining script run on the CPU."""
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]  # Python < 3.12
    if not hasattr(numpy, "product"):
        numpy.product = numpy.prod  # core 0.13 to 0.15 were written for numpy 1
    megatron_on_cpu.install()
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.memory_stats = lambda *args: collections.defaultdict(int)
    cuda.device_memory_used = lambda *args: 0
    import megatron.core.datasets.utils as datasets
    import megatron.core.distributed
    import megatron.core.parallel_state as parallel_state

    # fully sharded data parallelism asks for streams of NCCL
    parallel_state.get_nccl_options = lambda *args: None
    datasets.compile_helpers = lambda: None
    _build_models_without_transformer_engine()
    _copy_what_is_written_beside()
    _start_without_the_script()
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.training.initialize as initialize

    if not hasattr(moe_utils, "te_general_gemm"):  # core 0.16.1 looks for it without asking
        moe_utils.te_general_gemm = None  # whether Transformer Engine is there
    from tests.engines.megatron_fully_sharded import (
        have_no_layers_of_transformer_engine,
        take_gradients_as_later_releases_do,
    )

    have_no_layers_of_transformer_engine()
    take_gradients_as_later_releases_do(megatron.core.distributed.TorchFullyShardedDataParallel)
    kernels = getattr(initialize, "fused_kernels", None)
    if kernels is not None:  # up to core 0.16
        kernels.load = lambda args: None


def _build_models_without_transformer_engine() -> None:
    """Let models be built of megatron-core's own layers that are not GPTs."""
    sys.path.append(str(Path(__file__).parents[1] / "stand_ins"))  # behind an installed mamba_ssm
    import megatron.core.models.bert.bert_layer_specs as bert
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    # which pretrain_bert.py imports, whatever layers it is told to build
    bert.bert_layer_with_transformer_engine_spec = None
    init: Any = CLIPViTModel.__init__  # its norms are torch's here, and built by other arguments
    init.__defaults__ = tuple(
        WrappedTorchNorm if value is torch.nn.LayerNorm else value for value in init.__defaults__
    )


def _copy_what_is_written_beside() -> None:
    """Let `--async-save` write what there was as it began: from a device it is copied before."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as writing

    kind = writing.FileSystemWriterAsync
    prepare = kind.prepare_write_data

    def prepare_write_data(self: Any, plan: Any, planner: Any) -> None:
        prepare(self, plan, planner)
        self.write_buckets = [
            (path, name, (whole, [(item, tensor.clone()) for item, tensor in tensors]))
            for path, name, (whole, tensors) in self.write_buckets or []
        ]

    kind.prepare_write_data = prepare_write_data
    import megatron.core.dist_checkpointing.strategies.async_utils as beside

    from tests.launch import megatron_lm_on_cpu  # by its name, which another process can import

    caller: Any = beside.PersistentAsyncCaller
    megatron_lm_on_cpu.own_loop = caller.async_loop
    caller.async_loop = staticmethod(megatron_lm_on_cpu.write_beside)


def _start_without_the_script() -> None:
    """Let processes that Megatron spawns not import its script, which has nothing of ours there."""
    prepare = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {k: v for k, v in prepare(name).items() if k != "init_main_from_path"}

    multiprocessing.spawn.get_preparation_data = get_preparation_data


own_loop: Any = None  # of who writes, in a rank and in what it forks


def write_beside(*arguments: Any) -> None:
    """Be the process that writes checkpoints beside training, without a device to choose."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    cuda: Any = torch.cuda  # behind the imports: torch's compiler keeps a list of its functions
    cuda.device_count = lambda: 1
    cuda.set_device = lambda *args: None
    cuda.synchronize = lambda *args: None
    (own_loop or PersistentAsyncCaller.async_loop)(*arguments)


def serve(tree: Path) -> None:
    """Fork the ranks that stdin asks for, until it ends."""
    _import_all(tree)
    wake, ended = os.pipe()
    os.set_blocking(ended, False)
    signal.set_wakeup_fd(ended)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # that it came is in the pipe
    running: dict[int, int] = {}  # numbers by processes
    buffer = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 512)
            for pid in [*running]:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    _tell(running.pop(pid), pid, os.waitstatus_to_exitcode(status))
        if 0 not in ready:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            asked = json.loads(line)
            number = asked.pop("number")
            pid = os.fork()
            if not pid:
                _be_rank(**asked)
            running[pid] = number
            _tell(number, pid, None)


def _tell(*what: int | None) -> None:
    print(f"{RANK}{json.dumps(what)}", flush=True)


def _import_all(tree: Path) -> None:
    """Import what a pretraining script does; what is not of the package is imported anew."""
    install()
    before = {*sys.modules}
    sys.path.insert(0, str(tree))
    for name in ("megatron_patches.__main__", "megatron.training.training", "pretrain_gpt"):
        importlib.import_module(name)
    sys.path.remove(str(tree))
    for name in {*sys.modules} - before:
        file = str(getattr(sys.modules[name], "__file__", None))
        if Path(file).parent == tree:
            del sys.modules[name]
    torch.set_num_threads(1)


def _be_rank(environment: dict[str, str], arguments: list[str], log: str) -> typing.NoReturn:
    """Be a rank from here on: its environment, its output, and nothing of the server's."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(environment)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, out), (2, out)):
        os.dup2(source, target)
    method = torch.multiprocessing.get_context
    torch.multiprocessing.get_context = (  # of writers, which would import all of it once more
        lambda name=None: method("fork" if name == "spawn" else name)
    )
    status = 1
    try:
        _main(arguments)
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()  # as an interpreter that ends
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _main(arguments: list[str] | None = None) -> None:
    from megatron_patches.__main__ import main

    main(arguments)


if __name__ == "__main__":  # writers import this file by its name
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]))
    else:
        install()
        _main()
