"""Nothing that a support file must not hold gets through, and what helps stays readable."""

from __future__ import annotations

import json

import pytest

from dsx.support.scrub import REMOVED, Scrubber, hosts_in

TOKENS = [
    "hf_abcdefghijklmnopqrstuvwx",
    "sk-proj-abcdefghij0123456789",
    "ghp_0123456789abcdefghijABCDEFGHIJ",
    "AKIAIOSFODNN7EXAMPLE",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abcdefghijk",
    "0123456789abcdef0123456789abcdef01234567",
]


@pytest.mark.parametrize("token", TOKENS)
def test_a_known_form_of_token_is_removed_wherever_it_stands(token: str) -> None:
    told = Scrubber().text(f"logging in with {token} at step 3")
    assert told == f"logging in with {REMOVED} at step 3"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("WANDB_API_KEY=s3cr3tvalue python train.py", "s3cr3tvalue"),
        ('{"hf_token": "s3cr3t value", "step": 3}', "s3cr3t value"),
        ("password: hunter2", "hunter2"),
        ("--wandb-key s3cr3t7 --lr 1", "s3cr3t7"),
        ("GET /x?token=s3cr3t&step=3", "s3cr3t"),
        ("https://alice:s3cr3t@example.org/x", "s3cr3t"),
        ("https://alice:s3cr3t@example.org/x", "alice"),
        ("Authorization: Bearer s3cr3t", "s3cr3t"),
        ("mail to alice.b@example.org", "alice"),
        ("-----BEGIN RSA PRIVATE KEY-----\ns3cr3t\n-----END RSA PRIVATE KEY-----\nx", "s3cr3t"),
    ],
)
def test_what_is_named_like_a_key_loses_its_value(text: str, secret: str) -> None:
    scrubber = Scrubber()
    assert secret not in scrubber.text(text)
    assert sum(scrubber.found.values()) >= 1


@pytest.mark.parametrize(
    "text",
    [
        "iteration 40, tokens 8192, tokenizer gpt2, 12:30:45, utilization 98.1 %",
        "fragment 3 launched at step 40, cluster 1",
        "thread dsx-fragment-3\n  /opt/venv/lib/python3.11/threading.py:982 in run",
        "torch 2.6.0, nccl 2.21.5, dsx 0.3.0",
        '{"tokenizer_model": "vocab.json", "eod_tokens": 3, "monkey": 1}',
        "2026-11-22T18:52:12Z WARNING dsx.telemetry.stalls: has waited",
        "127.0.0.1:29500 and localhost:29500, 0.0.0.0, ::1",
    ],
)
def test_what_helps_stays(text: str) -> None:
    scrubber = Scrubber()
    assert scrubber.text(text) == text
    assert not scrubber.pseudonyms and not sum(scrubber.found.values())


def test_hosts_addresses_and_users_get_pseudonyms_that_are_the_same_throughout() -> None:
    scrubber = Scrubber()
    scrubber.know_hosts(["Node17.corp.example", "node18"])
    first = scrubber.text("process 7 on node17.corp.example: waits for 10.1.2.3:4000")
    second = scrubber.text("NODE17 lost node18, 10.1.2.3 and fd00::12 [02:42:ac:11:00:02]")
    assert first == "process 7 on host-1: waits for ip-1:4000"
    assert second == "host-1 lost host-2, ip-1 and ip-2 [mac-1]"
    assert scrubber.text("node170 and my-node17 and node17.py") == (
        "node170 and my-node17 and node17.py"
    )
    assert scrubber.text("no store at meet.corp:29400, tcp://front:29400") == (
        "no store at host-3:29400, tcp://host-4:29400"
    )
    assert scrubber.text("/home/alice/data /Users/bob/x /home/alice") == (
        "/home/user-1/data /Users/user-2/x /home/user-1"
    )
    assert scrubber.text(scrubber.text(first)) == first
    assert {**scrubber.pseudonyms}["ip"] == 2


def test_json_keeps_its_form() -> None:
    command = ["train.py", "--wandb-key", "abc", "--api-token=xyz", "--lr", "0.1", "--key", "--x"]
    command += ["--master_addr", "node3", "--save", "/home/alice/run"]
    about = {
        "command": command,
        "host": "node3.corp",
        "config": {"rendezvous": "tcp://front:29400", "tokens": 3, "api_key": "abc", "key": None},
        "list": [1, 2.5, None, True, {"secret": ["a", "b"]}],
    }
    scrubber = Scrubber()
    scrubber.know_hosts(hosts_in(about))
    told = scrubber.value(about)
    assert told["command"] == [
        "train.py", "--wandb-key", REMOVED, f"--api-token={REMOVED}", "--lr", "0.1", "--key", "--x",
        "--master_addr", told["host"], "--save", "/home/user-1/run",
    ]  # fmt: skip
    assert told["config"] == {
        "rendezvous": "tcp://host-2:29400" if told["host"] == "host-1" else "tcp://host-1:29400",
        "tokens": 3, "api_key": REMOVED, "key": None,
    }  # fmt: skip
    assert told["list"] == [1, 2.5, None, True, {"secret": REMOVED}]
    assert about["command"] == command and json.dumps(told)
    assert hosts_in(about) == {"node3", "node3.corp", "front"}


def test_a_text_of_many_colons_or_digits_takes_no_time() -> None:
    import time

    since = time.perf_counter()
    for text in ("a:" * 20_000, "1." * 20_000, "-----BEGIN PRIVATE KEY-----" * 500, "x" * 100_000):
        Scrubber().text(text)
    assert time.perf_counter() - since < 5
