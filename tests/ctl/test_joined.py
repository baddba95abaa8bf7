"""`dsx watch --join`: clusters followed over their links, by a member's key, whoever answers."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dsx.cli import app
from dsx.comm.links.desk import visitor_rank
from dsx.comm.links.key_call import KeyCall, NoAnswer
from dsx.comm.links.key_changes import make_key
from dsx.comm.links.keys import Keys
from dsx.comm.links.link import Link
from dsx.comm.links.options import LinkOptions
from dsx.comm.links.peer import FIRST_VISITOR
from dsx.ctl.joined import Joined
from dsx.ctl.mirror import mirror_folder
from dsx.telemetry.served_files import ByteBudget, ServedFiles
from tests.ctl.runs import NAMES, Run, make_settings, three_clusters
from tests.distributed import free_port
from tests.telemetry.watch.folders import append, make_run, step_record


@contextlib.contextmanager
def a_run(folder: Path) -> Generator[Run]:
    """Yield three clusters that hand out records: each has a folder of its own."""
    with three_clusters(folder) as run:
        settings = run.settings[0]
        members = [(name, settings.address_of(m)) for m, name in enumerate(NAMES)]
        for m, desk in enumerate(run.desks):
            own = make_run(folder / f"run_{m}", 3)
            budget = ByteBudget(lambda: None)
            files = ServedFiles(m, lambda own=own: own, members, budget)
            desk.verbs["records"] = files.answer
        yield run


def wait_until(is_so: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def keys_of(run: Run, m: int) -> Keys:
    return Keys.load(run.settings[m].keys, NAMES[m])


def address(run: Run, m: int) -> str:
    found = run.settings[0].address_of(m)
    assert found is not None
    return found


def join(*words: object) -> Result:
    return CliRunner().invoke(app, ["watch", "--no-browser", "--port", "0", *map(str, words)])


@pytest.mark.ci
def test_one_address_gives_all_clusters_and_one_that_ends_is_told(tmp_path: Path) -> None:
    with a_run(tmp_path) as run:
        copy, told = mirror_folder(tmp_path / "copy"), list[tuple[str, str]]()

        def tell(who: str, why: str) -> None:
            told.append((who, why))

        joined = Joined(lambda: keys_of(run, 2), [address(run, 1)], copy, tell)
        try:
            joined.wait(10)

            def is_here(m: int) -> bool:
                name = f"metrics.cluster_{m}.jsonl" if m else "metrics.jsonl"
                file = copy / name
                whole = (tmp_path / f"run_{m}" / name).read_bytes()
                return file.exists() and file.read_bytes() == whole

            wait_until(lambda: all(map(is_here, range(3))))  # rome has no address
            append(tmp_path / "run_0", 0, step_record(0, 41))
            wait_until(lambda: is_here(0))
            assert not any(why for _, why in told), told
            run.links[1].close()
            wait_until(lambda: any(who == "oslo (cluster 1)" and why for who, why in told))
            append(tmp_path / "run_2", 2, step_record(2, 41))
            wait_until(lambda: is_here(2))
            run.links[0].close()
            wait_until(lambda: any(who == "berlin (cluster 0)" and why for who, why in told))
            assert len(told) <= 3, told  # each once
        finally:
            joined.close()


def test_any_members_key_will_do_and_no_number_is_needed(tmp_path: Path) -> None:
    with a_run(tmp_path) as run:
        for own in [0, 1, 2] * 4:  # the cluster's own, too
            call = KeyCall(keys_of(run, own), address(run, 1), visitor_rank(), 10)
            assert (call.met.name, call.met.cluster) == ("oslo", 1)
            call.close()
        switch: Any = run.links[1]._switch  # type: ignore[reportPrivateUsage]
        wait_until(lambda: not any(rank >= FIRST_VISITOR for _, rank in switch.peers))
        assert not any(switch._num_unexpected.values())


def test_who_gets_nothing_is_told_why_in_one_line(tmp_path: Path) -> None:
    with a_run(tmp_path / "run") as run:
        berlin = tmp_path / "run" / "berlin"
        stranger = make_settings(tmp_path / "other")[0].keys
        done = join("--join", address(run, 1), "--keys", stranger, "--seconds", 5)
        said = done.stderr.strip()
        assert done.exit_code == 1 and said.count("\n") == 0, said
        assert "has none of the keys in" in said and "--keys FOLDER of this run's members" in said
        public = Path("members") / "oslo.public"
        (Path(stranger) / public).write_text((berlin / public).read_text())
        said = join("--join", address(run, 1), "--keys", stranger).stderr
        assert f"oslo at {address(run, 1)} does not take the key of berlin" in said
        assert "dsx keys add LINE" in said
        assert run.links[1].problems["a key of no member"]
        nowhere = f"127.0.0.1:{free_port()}"
        done = join("--join", nowhere, "--keys", berlin, "--seconds", 1)
        assert done.exit_code == 1
        assert f"nobody listens at {nowhere}, or the port is closed" in done.stderr
        open_link = Link(0, 0, None, LinkOptions())
        said = join("--join", f"127.0.0.1:{open_link.port}", "--keys", berlin).stderr
        open_link.close()
        assert 'a run of link.security "none" hands its records to nobody' in said


def test_options_that_do_not_fit_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for words, said in (
        ((), "give RUN, the run's folder, or --join HOST:PORT"),
        ((run, "--join", "a:1"), "and not both"),
        ((run, "--dir", tmp_path), "--dir and --name are for --join"),
        (("--join", "berlin", "--keys", run), "--join 'berlin' must be HOST:PORT"),
        (("--join", "a:1", "--keys", run), "holds no NAME.secret: give --keys FOLDER"),
    ):
        done = join(*words)
        assert done.exit_code == 2 and said in done.stderr, (words, done.stderr)
    for name in ("berlin", "oslo"):
        make_key(tmp_path / "keys", name)
    said = join("--join", "a:1", "--keys", tmp_path / "keys").stderr
    assert "holds the secrets of berlin, oslo: say --name NAME" in said
    own = ("--join", "a:1", "--keys", tmp_path / "keys", "--name", "oslo", "--dir", run)
    assert "holds files that no `dsx watch --join` has written" in join(*own).stderr


def test_a_call_has_a_deadline_where_nothing_is_said(tmp_path: Path) -> None:
    with a_run(tmp_path) as run:
        run.links[1].serve(lambda asker, body, answer: None, b"?")  # a desk that is silent
        call = KeyCall(keys_of(run, 0), address(run, 1), visitor_rank(), 10)
        with pytest.raises(NoAnswer, match="has not answered within 0.3 s"):
            call.ask(b"?{}", 0.3)
        call.close()


@contextlib.contextmanager
def a_door(to: str, num_hung_up: int) -> Generator[str]:
    """Yield where callers are hung up on first, so many of them, and then led to `to`."""
    with socket.create_server(("127.0.0.1", 0)) as door:

        def copy(here: socket.socket, there: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while said := here.recv(65536):
                    there.sendall(said)
                there.shutdown(socket.SHUT_WR)

        def lead() -> None:
            with contextlib.suppress(OSError):
                for number in itertools.count():
                    caller, _ = door.accept()
                    if number < num_hung_up:
                        caller.close()
                        continue
                    host, _, port = to.rpartition(":")
                    inside = socket.create_connection((host, int(port)))
                    for ends in ((caller, inside), (inside, caller)):
                        threading.Thread(target=copy, args=ends, daemon=True).start()

        threading.Thread(target=lead, daemon=True).start()
        yield f"127.0.0.1:{door.getsockname()[1]}"
        door.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("num_hung_up", [3, 4, 12])  # three keys, then a look at what is there
def test_who_hangs_up_at_first_is_called_until_ranks_are_there(
    tmp_path: Path, num_hung_up: int
) -> None:
    with a_run(tmp_path) as run, a_door(address(run, 1), num_hung_up) as place:
        joined = Joined(lambda: keys_of(run, 2), [place], mirror_folder(tmp_path / "copy"), _ignore)
        joined.wait(20)
        joined.close()


def _ignore(who: str, why: str) -> None:
    del who, why


def test_who_hangs_up_always_and_who_is_no_link_are_told_apart(tmp_path: Path) -> None:
    make_key(tmp_path / "keys", "oslo")
    keys = Keys.load(str(tmp_path / "keys"), "oslo")
    with a_door("", 10**9) as place, pytest.raises(NoAnswer, match="hangs up: a gateway") as told:
        KeyCall(keys, place, visitor_rank(), 1.0)
    assert not told.value.is_refusal
    with socket.create_server(("127.0.0.1", 0)) as other:

        def speak() -> None:
            with contextlib.suppress(OSError):
                while True:
                    other.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + 64 * b" ")

        threading.Thread(target=speak, daemon=True).start()
        place = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(NoAnswer, match="is no link") as told:
            KeyCall(keys, place, visitor_rank(), 1.0)
        assert told.value.is_refusal
        other.shutdown(socket.SHUT_RDWR)
