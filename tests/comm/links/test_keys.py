"""What a member holds: its keys serve libzmq, sign and tell members; every bad file is named."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from dsx.comm.links.key_changes import add_key, make_key, revoke_keys
from dsx.comm.links.key_files import read_secret
from dsx.comm.links.key_lines import to_base64
from dsx.comm.links.keys import Keys
from tests.comm.links.folders import own_key, sites
from tests.levels import by_default

NOBODY = 65534
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="root alone gives files away")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of two sites, which no test changes."""
    return sites(tmp_path_factory.mktemp("pair"), "site-a", "site-b")


@pytest.fixture
def folder(pair: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of site-a's folder."""
    return Path(shutil.copytree(pair["site-a"], tmp_path / "keys"))


def test_both_ends_know_each_other(pair: dict[str, Path]) -> None:
    a, b = (Keys.load(pair[name], name) for name in ("site-a", "site-b"))
    assert a.names() == b.names() == ["site-a", "site-b"] and a.is_member
    assert zmq.curve_public(a.curve_secret) == a.curve_public
    assert b.curve_keys_of("site-a") == [a.curve_public] and a.curve_keys_of("site-c") == []
    assert b.member_of(z85.decode(a.curve_public)) == "site-a"
    assert b.member_of(bytes(32)) is None and b.member_of(a.curve_public) is None
    assert b.fingerprints_of("site-a") == [a.fingerprint] == a.fingerprints_of("site-a")


@given(data=st.binary(max_size=200), at=st.integers(0, 63), bit=st.integers(0, 7))
def test_a_signature_is_of_one_member_and_of_one_message(
    pair: dict[str, Path], data: bytes, at: int, bit: int
) -> None:
    a, b = (Keys.load(pair[name], name) for name in ("site-a", "site-b"))
    signature = a.sign(data)
    assert len(signature) == 64 and b.verify("site-a", data, signature)
    assert not b.verify("site-b", data, signature) and not b.verify("site-c", data, signature)
    assert not b.verify("site-a", data + b"\0", signature)
    other = bytes(byte ^ (1 << bit if i == at else 0) for i, byte in enumerate(signature))
    assert not b.verify("site-a", data, other) and not b.verify("site-a", data, signature[:-1])


def test_its_keys_carry_a_line_of_libzmq(pair: dict[str, Path]) -> None:
    """And the ZAP handler gets the 32 bytes that `member_of` takes."""
    a, b = (Keys.load(pair[name], name) for name in ("site-a", "site-b"))
    context = zmq.Context()
    try:
        door, server, client = (context.socket(k) for k in (zmq.REP, zmq.ROUTER, zmq.DEALER))
        door.bind("inproc://zeromq.zap.01")
        server.curve_server, server.curve_secretkey = True, a.curve_secret
        port = server.bind_to_random_port("tcp://127.0.0.1")
        client.curve_serverkey = b.curve_keys_of("site-a")[0]
        client.curve_publickey, client.curve_secretkey = b.curve_public, b.curve_secret
        for socket in (door, server, client):
            socket.linger, socket.rcvtimeo = 0, 20_000
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send(b"weights")
        version, request, *_, key = door.recv_multipart()
        name = a.member_of(key)
        assert name == "site-b"
        door.send_multipart([version, request, b"200", b"", name.encode(), b""])
        assert server.recv_multipart()[1] == b"weights"
    finally:
        context.destroy(linger=0)


def test_two_keys_of_one_member(tmp_path: Path) -> None:
    folders = sites(tmp_path, "site-a", "site-b")
    old = Keys.load(folders["site-a"], "site-a")
    new = own_key(folders["site-a"], "site-a")
    add_key(folders["site-b"], new)
    a, b = (Keys.load(folders[name], name) for name in ("site-a", "site-b"))
    assert a.curve_public == old.curve_public, "the first one until it is revoked"
    assert b.curve_keys_of("site-a") == [old.curve_public, z85.encode(new.curve)]
    assert b.member_of(new.curve) == b.member_of(z85.decode(old.curve_public)) == "site-a"
    revoke_keys(folders["site-a"], "site-a", old.fingerprint)
    a = Keys.load(folders["site-a"], "site-a")
    assert z85.decode(a.curve_public) == new.curve and a.fingerprint == new.fingerprint
    assert b.verify("site-a", b"x", a.sign(b"x")) and b.verify("site-a", b"x", old.sign(b"x"))
    assert len(read_secret(folders["site-a"], "site-a")) == 1, "the old secret is erased"


def test_nothing_shows_a_secret(folder: Path) -> None:
    keys = Keys.load(folder, "site-a")
    (secret,) = read_secret(folder, "site-a")
    shown = f"{keys!r} {keys} {secret!r} {secret} {[secret]}"
    assert "site-a" in shown and keys.fingerprint in shown
    for hidden in spellings(folder):
        assert hidden not in shown
    for holder in (keys, secret):
        with pytest.raises(TypeError, match="not pickled"):
            pickle.dumps(holder)


def spellings(folder: Path) -> list[str]:
    """Return what would give a secret away, as text."""
    found: list[str] = []
    for secret in read_secret(folder, "site-a"):
        for part in (secret.curve_secret, secret.sign_seed):
            found += [repr(part), str(list(part)), part.hex(), z85.encode(part).decode()]
    text = (folder / "site-a.secret").read_text()
    return found + re.findall(r"(?:curve-secret|sign-seed):(\S+)", text)


Change = Callable[[Path], None]


def lines_of(name: str, change: Callable[[list[str]], list[str]]) -> Change:
    """Return what changes a file's lines."""

    def apply(folder: Path) -> None:
        path = folder / name
        lines = change(path.read_text().split("\n"))
        path.write_text("\n".join(lines))

    return apply


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def mode(name: str, bits: int) -> Change:
    return lambda folder: (folder / name).chmod(bits)


def third_key(folder: Path) -> None:
    lines = [make_key(folder / f"x{i}", "site-b")[-1].line + "\n" for i in range(2)]
    with (folder / "members/site-b.public").open("a") as file:
        file.writelines(lines)


def same_key_as(folder: Path) -> None:
    text = (folder / "members/site-b.public").read_text()
    (folder / "members/site-c.public").write_text(text.replace("site-b", "site-c"))


def another_own_key(folder: Path) -> None:
    line = make_key(folder / "x", "site-a")[-1].line
    (folder / "members/site-a.public").write_text(line + "\n")


def revoke_own(folder: Path) -> None:
    secret = (folder / "site-a.secret").read_bytes()
    revoke_keys(folder, "site-a")
    os.close(os.open(folder / "site-a.secret", os.O_CREAT | os.O_WRONLY, 0o600))
    (folder / "site-a.secret").write_bytes(secret)  # from a copy


def swap_secrets(lines: list[str]) -> list[str]:
    curve, seed = (word.partition(":")[2] for word in lines[2].split())
    return [*lines[:2], f"curve-secret:{seed} sign-seed:{curve}", *lines[3:]]


def another_seed(lines: list[str]) -> list[str]:
    return [*lines[:2], f"{lines[2].split()[0]} sign-seed:{to_base64(bytes(32))}", ""]


B = "members/site-b.public"
REFUSALS: dict[str, tuple[Change, str]] = {
    "no secret": (remove("site-a.secret"), r"site-a\.secret is not there: `dsx keys new site-a"),
    "no members": (lambda f: shutil.rmtree(f / "members"), "members: No such file.*`dsx keys new"),
    "readable by all": (mode("site-a.secret", 0o644), r"mode 0644: .*`chmod 0600 \S*site-a.sec"),
    "readable by its group": (mode("site-a.secret", 0o640), "0640: .*0600 .*or allow group-read"),
    "writable by its group": (mode("site-a.secret", 0o620), "mode 0620: .*`chmod 0600"),
    "a folder": (lambda f: (remove(B)(f), (f / B).mkdir())[0], "site-b.public is not a file"),
    "a pipe": (lambda f: (remove(B)(f), os.mkfifo(f / B))[0], "site-b.public is not a file"),
    "too large": (lambda f: os.truncate(f / B, 2_000_000), "2000000 bytes, too many"),
    "not text": (lambda f: (f / B).write_bytes(b"\xff\n") and None, "is not text of ASCII"),
    "empty": (lambda f: os.truncate(f / B, 0), "site-b.public does not end with a line's end"),
    "half a line": (lambda f: os.truncate(f / B, 90), "line's end: it is empty, or half written"),
    "a line cut": (lines_of(B, lambda _: ["dsx-key-1 site-b curv", ""]), "site-b.public:1: it has"),
    "a bad second line": (lines_of(B, lambda x: ["# note", *x[:1], "y", ""]), "public:3: it does"),
    "comments alone": (lines_of(B, lambda _: ["# none", ""]), "it holds 0 keys; a member has one"),
    "three keys": (third_key, "site-b.public: it holds 3 keys; a member has one, or 2"),
    "twice": (lines_of(B, lambda x: [x[0], x[0], ""]), "public:2: the key .* is there twice"),
    "another's": (lambda f: os.rename(f / B, f / "members/c.public"), "c.public:1: .* of site-b"),
    "a name": (lambda f: os.rename(f / B, f / "members/c d.public"), "'c d' cannot be a member's"),
    "a key of two": (same_key_as, "site-c.public: .* shares what belongs to site-b"),
    "no own line": (remove("members/site-a.public"), "own public line is not there; `dsx keys"),
    "another own line": (another_own_key, "public holds .*another key.*keys revoke site-a"),
    "own key revoked": (revoke_own, "its key .* is revoked; move the file away"),
    "revoked, malformed": (
        lambda f: (f / "members/revoked").write_text("x\n") and None, "revoked:1: it does not begin"
    ),
    "members writable by all": (mode("members", 0o777), "0777: every user .*`chmod o-w"),
    "a line writable by all": (mode(B, 0o666), "site-b.public has mode 0666: every user"),
    "the folder writable by all": (mode(".", 0o777), "0777: every user .*`chmod o-w"),
    "secret: version": (lines_of("site-a.secret", lambda x: ["v", *x[1:]]), "secret:1: .*secret-1"),
    "secret: cut": (lines_of("site-a.secret", lambda x: [*x[:2], ""]), "2 lines, not 3"),
    "secret: half": (lambda f: os.truncate(f / "site-a.secret", 200), "or half written"),
    "secret: swapped": (lines_of("site-a.secret", swap_secrets), "secret:3: .* not belong to the"),
    "secret: another seed": (lines_of("site-a.secret", another_seed), "secret:3: .* not belong"),
    "secret: no base64": (
        lines_of("site-a.secret", lambda x: [*x[:2], x[2][:-3] + "??=", ""]), "sign-seed: is not 32"
    ),
    "secret: one part": (
        lines_of("site-a.secret", lambda x: [*x[:2], x[2].split()[0], ""]), "secret:3: it is not"
    ),
    "secret: of another": (
        lambda f: shutil.copy(f.parent / "b.secret", f / "site-a.secret") and None, "of site-b, not"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_file_and_what_to_do(
    case: str, folder: Path, pair: dict[str, Path]
) -> None:
    change, why = REFUSALS[case]
    shutil.copy(pair["site-b"] / "site-b.secret", folder.parent / "b.secret")
    hidden = [*spellings(folder), *(folder.parent / "b.secret").read_text().split()[-2:]]
    Keys.load(folder, "site-a")
    change(folder)
    with pytest.raises(ValueError, match=why) as caught:
        Keys.load(folder, "site-a")
    told = "".join(traceback.format_exception(caught.value))
    assert str(folder) in str(caught.value)
    assert [text for text in hidden if text in told] == []


def test_what_no_own_line_says_mends_it(folder: Path) -> None:
    (folder / "members/site-a.public").unlink()
    with pytest.raises(ValueError, match="own public line") as caught:
        Keys.load(folder, "site-a")
    command = str(caught.value).split("`")[1]
    subprocess.run(["bash", "-c", f"{sys.executable} -m {command}"], check=True, timeout=60)
    assert Keys.load(folder, "site-a").is_member


@only_root
def test_a_secret_of_another_user_is_refused(folder: Path) -> None:
    """Root reads whatever it likes: it is the owner that counts."""
    os.chown(folder / "site-a.secret", NOBODY, NOBODY)
    with pytest.raises(ValueError, match=f"belongs to user {NOBODY}.*`chown 0 "):
        Keys.load(folder, "site-a", group_read=True)


@only_root
def test_a_secret_that_cannot_be_read_is_named(folder: Path) -> None:
    for path in [folder.parent, *folder.parent.parents]:
        if path.stat().st_uid == 0 and path.name.startswith("pytest"):
            path.chmod(0o755)
    folder.chmod(0o755)
    code = f"""
import json
import os
from dsx.comm.links.keys import Keys
os.setgid({NOBODY}); os.setuid({NOBODY})
Keys.load({str(folder)!r}, "site-a", group_read=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1].startswith("ValueError: cannot read ")
    assert "site-a.secret: Permission denied" in done.stderr


@pytest.mark.parametrize("bits", [0o640, 0o440, 0o400, 0o600])
def test_mounted_secrets_are_links_that_a_group_reads(folder: Path, bits: int) -> None:
    """As Kubernetes mounts them: NAME.secret -> ..data/NAME.secret, ..data -> ..2026_11_23."""
    mounted = folder.parent / "mounted"
    data = mounted / "..2026_11_23"
    data.mkdir(parents=True)
    (mounted / "..data").symlink_to(data.name)
    shutil.copytree(folder / "members", data / "members")
    shutil.copy(folder / "site-a.secret", data / "site-a.secret")
    (data / "site-a.secret").chmod(bits)
    for name in ("site-a.secret", "members"):
        (mounted / name).symlink_to(f"..data/{name}")
    keys = Keys.load(mounted, "site-a", group_read=True)
    assert keys.names() == ["site-a", "site-b"] and keys.reload() == set()
    (data / "site-a.secret").chmod(bits | 0o004)
    with pytest.raises(ValueError, match="0640 is the widest; `chmod 0640"):
        Keys.load(mounted, "site-a", group_read=True)


@pytest.mark.parametrize("package", by_default(["zmq", "cryptography"], "zmq"))
def test_without_the_extra_it_says_how_to_get_it(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from dsx.cli import app; app()"
    for command, status in ((["keys", "list", "--dir", "/"], 2), (["keys", "--help"], 0)):
        done = subprocess.run(
            [sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == status, done.stderr
        if status:
            assert done.stderr == (
                "dsx keys list: keys and secured links between clusters need pyzmq and "
                'cryptography: pip install "dsx-train[links]"\n'
            )


@pytest.mark.parametrize("package", by_default(["zmq", "cryptography"], "zmq"))
def test_a_run_over_links_without_the_extra_says_how_to_get_it(
    package: str, tmp_path: Path
) -> None:
    link = {"security": "curve", "members": ["a=127.0.0.1:29400", "b"]}
    clusters = {"num_clusters": 2, "cluster_id": 0}
    config = {"dsx": {"preset": "diloco", "clusters": clusters, "link": link}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    block = f"import sys; sys.modules[{package!r}] = None; "
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29499"}
    command = "from dsx.cli import app; app([{}, 'ds.json', '--cluster-id', '0'{}])"
    runs = [
        f"import dsx; dsx.init_distributed({config})",
        command.format("'keys', 'check'", ""),
        command.format("'net-test', '--config'", ", '--clusters', '2'"),
    ]
    for run in runs:
        done = subprocess.run(
            [sys.executable, "-c", block + run], capture_output=True, text=True, timeout=60,
            cwd=tmp_path, env=os.environ | alone | {"PYTHONPATH": str(Path(__file__).parents[3])},
        )  # fmt: skip
        assert done.returncode and done.stderr.endswith(
            'need pyzmq and cryptography: pip install "dsx-train[links]"\n'
        ), done.stderr
