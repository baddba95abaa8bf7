"""Commands in Python that are forked from a template, with what they import imported once.

A launcher, the process that it starts, and each rank import torch and DeepSpeed, seconds of CPU
time each, before any of them does what a test looks at. Here the command is forked from a template
(see templates.py), and what it starts in Python itself it forks, in place of `fork` and `exec`: the
tree of processes, their groups, command lines, environments, signals, files and exit statuses are
those of commands that are started. What differs: all of one command hash alike (two that follow
each other do not), and modules have been imported before.

A process is started as ever where it is not Python's, has other options than `-u` and `-m` or
another path to import from, where the one that starts it has threads (unless it is torchrun: see
spare_processes.py), and on a system that does not let a process say what its command line is.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import multiprocessing.process
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from multiprocessing import context, forkserver, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import torch

from tests.spare_processes import Told, fork_spares, give_to_spare, ranks_of
from tests.templates import ForkedRank, environment_of_imports, main_process, start_templates

_PYTHONS = {
    path for path in Path(sys.executable).parent.glob("python*") if path.samefile(sys.executable)
}
ROOT = Path(__file__).parents[1]  # which is on every test's path
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_count = itertools.count()
_at_exit: list[Callable[..., Any]] = []
_really_register = atexit.register
_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def start_command(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    is_executed: bool = False,
    folder: Path | None = None,
) -> subprocess.Popen[bytes] | ForkedCommand:
    """Start it in a session of its own, with its output in a file: forked where it can be.

    It runs in `folder`, or where this process does.
    """
    if not is_executed and can_be_forked(command, environment):
        return ForkedCommand(command, log, environment, folder)
    with log.open("ab") as file:
        return subprocess.Popen(
            [*command], stdout=file, stderr=subprocess.STDOUT, env={**environment},
            start_new_session=True, cwd=folder,
        )  # fmt: skip


class ForkedCommand:
    """A command in a session of its own, its output at the end of a file; used as a `Popen` is."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:
        """Start it; ValueError if it is none of `can_be_forked`."""
        if not can_be_forked(command, environment):
            raise ValueError(f"not a command of this Python: {command}")
        self.args = [*command]
        log.touch()
        start_templates("deepspeed")
        self._process: Any = ForkedRank(
            "deepspeed", next(_count), target=_first,
            args=(self.args, str(log), {**environment}, str(folder or Path.cwd())), daemon=True,
        )  # fmt: skip
        self._process.start()
        self.pid: int = self._process.pid
        while self.poll() is None and not self._leads_its_group():
            time.sleep(0.001)

    def _leads_its_group(self) -> bool:
        try:
            return os.getpgid(self.pid) == self.pid
        except ProcessLookupError:
            return False

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def can_be_forked(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a command would run in this Python, importing from where this process does."""
    has_same_path = environment.get("PYTHONPATH") in (os.environ.get("PYTHONPATH"), str(ROOT))
    is_program = bool(_program_of(command, environment.get("PATH")))
    return has_same_path and is_program and _can_be_shown()


@functools.cache
def _can_be_shown() -> bool:
    """Whether this system lets a process say what its command line is."""
    pid = os.fork()
    if pid == 0:
        try:
            _show(["python"], {})
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _program_of(command: Sequence[str], path: str | None = None) -> list[str]:
    """`[script, ...]` or `["-m", module, ...]` of a command of this Python; empty for others."""
    if Path(command[0]) in _PYTHONS:
        rest = [*command[1:]]
        while rest[:1] == ["-u"]:
            rest.pop(0)
        is_program = len(rest) > 0 and (not rest[0].startswith("-") or rest[0] == "-m")
        return rest if is_program else []
    program = shutil.which(command[0], path=path) or command[0]
    try:
        with open(program, "rb") as file:
            first = file.readline().decode(errors="replace").strip()
    except OSError:
        return []
    is_script = first.startswith("#!") and Path(first[2:].strip()) in _PYTHONS
    return [program, *command[1:]] if is_script else []


def _first(command: list[str], log: str, environment: dict[str, str], folder: str) -> NoReturn:
    """What a template forks: a command whose own commands are forked too."""
    subprocess.Popen._execute_child = _fork_or_execute  # type: ignore[attr-defined]
    atexit.register = _register
    os.setsid()
    os.chdir(folder)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # multiprocessing has closed it
    _become(command, environment, keep=())


def _register(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In place of `atexit.register`: what a command registers is not to be run in what it forks."""
    _at_exit.append(function)
    return _really_register(function, *args, **kwargs)


def _fork_or_execute(self: Any, *args: Any, **kwargs: Any) -> None:
    """In place of `Popen._execute_child`: fork what can be forked, and execute all else."""
    given = signature(_execute_child).bind(self, *args, **kwargs).arguments
    command = given["args"]
    command = [command] if isinstance(command, (str, bytes, os.PathLike)) else [*command]
    command = [os.fsdecode(part) for part in command]
    environment = dict(os.environ if given["env"] is None else given["env"])
    plain = not given["shell"] and given["preexec_fn"] is None and given["executable"] is None
    plain = plain and given["close_fds"] and all(given[who] in (None, -1) for who in ("gid", "uid"))
    if not (plain and can_be_forked(command, environment)):
        _execute_child(self, *args, **kwargs)
        return
    has_one_thread = len(os.listdir("/proc/self/task")) == 1
    pid = -1 if has_one_thread else give_to_spare(command, environment, given)
    if pid == 0:
        _execute_child(self, *args, **kwargs)
        return
    sys.audit("subprocess.Popen", command[0], command, given["cwd"], given["env"])
    sys.stdout.flush()
    sys.stderr.flush()
    if pid < 0 and (pid := os.fork()) == 0:
        _be((command, environment, given))
    self.pid, self._child_created = pid, True
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    self._close_pipe_fds(*(given[name] for name in pipes))


def _be(told: Told) -> NoReturn:
    """Be a command, in a child: Popen's arguments say where and with which files."""
    command, environment, given = told
    try:
        _take_its_place(given)
    except BaseException as error:
        os.write(2, f"{command}: {error}\n".encode())
        os._exit(127)
    _become(command, environment, given.get("pass_fds", ()))


def _take_its_place(given: dict[str, Any]) -> None:
    """Its folder, its group and its three files, as Popen's own child does."""
    files = {0: given["p2cread"], 1: given["c2pwrite"], 2: given["errwrite"]}
    copies = {number: os.dup(file) for number, file in files.items() if file != -1}
    for number, copy in copies.items():
        os.dup2(copy, number)
    if given["cwd"] is not None:
        os.chdir(given["cwd"])
    if given["start_new_session"]:
        os.setsid()
    if (group := given.get("process_group", -1)) >= 0:
        os.setpgid(0, group)


def _become(command: list[str], environment: dict[str, str], keep: Sequence[int]) -> NoReturn:
    """Run a command in this process, and end it as its interpreter would."""
    for number in sorted({*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, *keep}):
        try:
            os.close(number)
        except OSError:  # that of the listing
            continue
    _forget_parents()
    os.environ.clear()
    os.environ.update(environment_of_imports | environment)
    _show(command, environment)
    program = _program_of(command)
    if threads := environment.get("OMP_NUM_THREADS"):  # which is read as torch is loaded
        torch.set_num_threads(int(threads))
    fork_spares(ranks_of(program), _be)
    at_once = "-u" in command[:2] or bool(environment.get("PYTHONUNBUFFERED"))
    sys.stdout.reconfigure(line_buffering=at_once)  # type: ignore[union-attr]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    status = 1
    try:
        if program[0] == "-m":
            sys.argv, sys.path[0] = ["-m", *program[2:]], os.getcwd()
            runpy._run_module_as_main(program[1])  # type: ignore[attr-defined]
        else:
            sys.argv, sys.path[0] = program, str(Path(program[0]).resolve().parent)
            main.__file__ = program[0]
            exec(compile(Path(program[0]).read_bytes(), program[0], "exec"), main.__dict__)
        status = 0
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        status = code if isinstance(code, int) else int(code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        if isinstance(sys.exc_info()[1], KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    ctypes.pythonapi.Py_Exit(status & 0xFF)
    raise AssertionError("a process has outlived its end")


def _forget_parents() -> None:
    """Undo what is not inherited: handlers of signals and of the end, what multiprocessing is."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    while _at_exit:
        atexit.unregister(_at_exit.pop())
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    process: Any = multiprocessing.process
    process._current_process, process._parent_process = main_process, None
    main_process.name = "MainProcess"
    process._children, process._process_counter = set(), itertools.count(1)
    context._default_context._actual_context = None  # type: ignore[attr-defined]
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address = server._forkserver_alive_fd = server._inherited_fds = None
    tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    tracker._fd = tracker._pid = None


class _Map(ctypes.Structure):
    """Where the parts of a process's memory are: `struct prctl_mm_map`."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in (
            "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack",
            "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32), ("exe_fd", ctypes.c_uint32),
    ]  # fmt: skip


_shown: Any = None  # the memory in which they stand


def _show(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have /proc show a command line and an environment as this process's; OSError if it cannot."""
    global _shown
    arguments = b"".join(os.fsencode(part) + b"\0" for part in command)
    variables = b"".join(os.fsencode(f"{k}={v}") + b"\0" for k, v in environment.items())
    shown = ctypes.create_string_buffer(arguments + variables)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    field = {number + 3: int(text) for number, text in enumerate(stat) if number > 0}
    start = ctypes.addressof(shown)
    middle, end = start + len(arguments), start + len(arguments) + len(variables)
    places = _Map(
        field[26], field[27], field[45], field[46], field[47], libc.sbrk(0), field[28],
        start, middle, middle, end, 0, 0, 0xFFFFFFFF,
    )  # fmt: skip
    size = ctypes.c_ulong(ctypes.sizeof(places))
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(places), size, ctypes.c_ulong(0)):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_MM_MAP)")
    _shown = shown
