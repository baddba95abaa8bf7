"""One notice to one place: what is sent, and what is said where it does not arrive."""

from __future__ import annotations

import json
import socket
import ssl
import sys
import time
from pathlib import Path

import pytest

from dsx.telemetry.notices.hooks import Command, Undelivered, Webhook, shown_address
from tests.installed import needs
from tests.telemetry.notices.web import Web, notice


def test_json_has_all_of_it() -> None:
    with Web() as web:
        Webhook(web.url, "json").deliver(notice(held={"left_out": 2, "lost": 1}), 5)
    path, headers, _ = web.got[0]
    assert path == "/services/T0/SECRET" and headers["Content-Type"] == "application/json"
    assert web.documents == [
        {"kind": "lost", "run": "first", "step": 120, "cluster": 0, "clusters": [1], "host": "a",
         "text": "dsx, first: cluster 1 is lost (3 more before this were held back: 2 left_out, "
         "1 lost)", "time": "1970-01-01T00:00:00Z", "held_back": {"left_out": 2, "lost": 1}}
    ]  # fmt: skip


def test_slack_has_the_text_and_no_markup_of_others() -> None:
    with Web() as web:
        Webhook(web.url, "slack").deliver(notice(text="<!channel> & <http://a|b>"), 5)
    text = "dsx, first: &lt;!channel&gt; &amp; &lt;http://a|b&gt;"
    assert web.documents == [{"text": text}]


def test_a_text_of_any_length_is_cut() -> None:
    assert len(notice(text="x" * 10**6).sentence) < 2100


@pytest.mark.parametrize(
    ("status", "words", "may_retry"),
    [(500, "it answered 500 Internal Server Error", True), (429, "it answered 429", True),
     (404, "it answered 404 Not Found", False), (302, "a redirect, and none is followed", False)],
)  # fmt: skip
def test_an_answer_that_is_no_success(status: int, words: str, may_retry: bool) -> None:
    with Web([status]) as web, Web() as other:
        web.headers = {"Retry-After": "7"}
        if status == 302:
            web.headers["Location"] = other.url
        with pytest.raises(Undelivered, match=words) as caught:
            Webhook(web.url, "json").deliver(notice(), 5)
    assert (caught.value.may_retry, caught.value.wait_seconds) == (may_retry, 7.0)
    assert len(web.got) == 1 and not other.got
    assert "SECRET" not in str(caught.value)


def test_a_server_that_is_too_slow_or_not_there() -> None:
    with Web(seconds=30) as web:
        began = time.monotonic()
        with pytest.raises(Undelivered, match="timed out") as caught:
            Webhook(web.url, "json").deliver(notice(), 0.3)
        assert time.monotonic() - began < 5 and caught.value.may_retry
        url = web.url
    with pytest.raises(Undelivered, match="Connection refused") as caught:
        Webhook(url, "json").deliver(notice(), 5)
    assert caught.value.may_retry
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        with pytest.raises(Undelivered):  # which says nothing
            Webhook(f"http://127.0.0.1:{one.getsockname()[1]}/", "json").deliver(notice(), 0.3)


@needs("cryptography")
def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    _write_certificate(tmp_path)
    with Web() as web:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "own.pem")
        web.server.socket = context.wrap_socket(web.server.socket, server_side=True)
        url = web.url.replace("http://", "https://")
        with pytest.raises(Undelivered, match="CERTIFICATE_VERIFY_FAILED"):
            Webhook(url, "json").deliver(notice(), 5)
    assert not web.got


def _write_certificate(folder: Path) -> None:
    from datetime import datetime, timedelta, timezone
    from ipaddress import ip_address

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(timezone.utc)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    made = x509.CertificateBuilder(
        name, name, key.public_key(), 1, now, now + timedelta(days=1)
    ).add_extension(names, critical=False).sign(key, hashes.SHA256())  # fmt: skip
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "own.pem").write_bytes(pem + made.public_bytes(serialization.Encoding.PEM))


@pytest.mark.parametrize(
    "url",
    ["hooks.slack.com/SECRET", "ftp://h/SECRET", "https:///SECRET", "https://u:p@h/SECRET",
     "https://h/SECRET x", "https://h:99999/SECRET", "https://[h/SECRET", "https://h:0/SECRET",
     "https://h/SECRET\r\nHost: b", "https://h..SECRET/x", f"https://{'SECRET' * 11}/x"],
)  # fmt: skip
def test_an_address_that_is_none_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ValueError, match="write, for example") as caught:
        Webhook(url, "json")
    assert "SECRET" not in str(caught.value) and "u:p" not in str(caught.value)


def test_what_is_shown_of_an_address() -> None:
    assert (
        shown_address("https://hooks.slack.com/services/SECRET?a=b")
        == "https://hooks.slack.com/..."
    )


READS = "import json, os, sys; open(sys.argv[1], 'w').write(json.dumps([json.load(sys.stdin), os.environ['NOTICE_KIND'], os.environ['NOTICE_TEXT']]))"  # noqa: E501


def test_a_command_has_it_on_its_standard_input_and_in_its_environment(tmp_path: Path) -> None:
    one = notice(text='$(touch gone) `x` "; \0')
    Command([sys.executable, "-c", READS, str(tmp_path / "got")]).deliver(one, 20)
    document, kind, text = json.loads((tmp_path / "got").read_text())
    assert document == one.document() and kind == "lost"
    assert text == one.sentence.replace("\0", " ")


def test_a_command_that_fails_says_why() -> None:
    words = [sys.executable, "-c", "import sys; print('a'); sys.exit('no such channel')"]
    with pytest.raises(Undelivered, match="its exit status is 1: no such channel") as caught:
        Command(words).deliver(notice(), 20)
    assert caught.value.may_retry
    with pytest.raises(Undelivered, match="it cannot be run: No such file") as caught:
        Command(["/no/such/command"]).deliver(notice(), 5)
    assert not caught.value.may_retry


def test_a_command_that_hangs_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    words = ["sh", "-c", f"(sleep 1.5; touch {tmp_path}/alive) & sleep 60"]
    began = time.monotonic()
    with pytest.raises(Undelivered, match="it took longer than 0 s"):
        Command(words).deliver(notice(), 0.4)
    assert time.monotonic() - began < 5
    time.sleep(2)
    assert not (tmp_path / "alive").exists()


def test_a_command_that_leaves_something_behind_has_done_it(tmp_path: Path) -> None:
    words = ["sh", "-c", f"(sleep 1.5; touch {tmp_path}/alive) & exit 0"]
    Command(words).deliver(notice(), 0.5)  # what it left holds its standard error
    time.sleep(1.5)
    assert not (tmp_path / "alive").exists()


def test_the_page_says_what_is_told() -> None:
    from dsx.telemetry.notices.notice import KINDS
    from tests.docs.pages import ROOT

    page = (ROOT / "docs" / "notices.md").read_text()
    rows = "\n".join(f"| `{kind}` | {meaning} |" for kind, meaning in KINDS.items())
    told = page.partition("<!-- kinds: begin -->")[2].partition("<!-- kinds: end -->")[0]
    assert told.strip().partition("| --- | --- |\n")[2] == rows, (
        f"docs/notices.md is to have:\n{rows}"
    )
