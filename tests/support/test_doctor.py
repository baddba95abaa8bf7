"""`dsx doctor`: what would stop a run is said with the fix, and pictures are what the loop does."""

from __future__ import annotations

import json
import os
import re
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dsx.cli import app
from dsx.config.link import LinkConfig
from dsx.config.schema import load_config, preset
from dsx.config.sections import ClustersConfig
from dsx.core.types import Stage
from dsx.plan.link import Costs, Link
from dsx.plan.model import from_files
from dsx.plan.model_files import read_model
from dsx.plan.predict import predict_traffic
from dsx.plan.traffic import Traffic
from dsx.support.doctor import machine
from dsx.support.doctor.rounds import Period, Transfer, draw, period_of, transfers_of
from tests.docs.pages import ROOT, blocks
from tests.tiny import CASES

GOLDEN = ROOT / "tests" / "golden"
FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 256 "
    "--micro-batch-size 1 "
)
MEASURED = {"clusters": 2, "bits_per_second": 1e6, "latency_seconds": 0.01, "streams": 1}


def write(folder: Path, **block: Any) -> Path:
    """A DeepSpeed JSON whose "dsx" block is diloco's with changes."""
    whole = {"preset": "diloco", "clusters": {"num_clusters": 2}, **block}
    path = folder / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}, "dsx": whole}))
    return path


def doctor(*arguments: object) -> Result:
    words = [str(argument) for argument in arguments]
    return CliRunner().invoke(app, ["doctor", *words])


def lines_of(done: Result) -> list[str]:
    """What is printed, a line per finding."""
    return unwrapped(done.stdout)


def unwrapped(text: str) -> list[str]:
    return re.sub(r"\n {20}", " ", text).splitlines()


def marked(done: Result, subject: str) -> list[tuple[str, str]]:
    """The mark and the text of each line about a subject."""
    lines = [re.match(rf"(ok|note|STOP) +{subject} +(.*)", x) for x in lines_of(done)]
    return [(line[1], line[2]) for line in lines if line]


def stops(done: Result) -> list[str]:
    return [line for line in lines_of(done) if line.startswith("STOP")]


@pytest.mark.parametrize("name", sorted(CASES))
def test_launches_and_applies_are_those_of_the_loop(name: str) -> None:
    """What runs did is in tests/golden; where they measure norms, up to the first they had."""
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    did = [tuple(each) for each in golden["transfers [fragment, launched, applied]"]]
    method = CASES[name].method(2)
    count = 1 + max(fragment for fragment, _, _ in did)
    steps = method.schedule.interval if method.schedule.uses_norms else 16
    found = transfers_of(method, [1] * count, Stage(), steps)
    applied = [(t.fragment, t.launched, t.applied) for t in found if t.applied is not None]
    assert sorted(applied) == sorted(each for each in did if each[2] <= steps)
    assert applied


def picture(name: str, count: int, **overrides: dict[str, Any]) -> list[str]:
    method = preset(name, 2, **overrides)
    period = period_of(method)
    return draw(transfers_of(method, [1] * count, Stage(), period.last), count, period)


def test_pictures_of_presets() -> None:
    every = {"interval": 10}
    assert picture("diloco", 1, schedule=every) == ["fragment 0     .........@"]
    assert picture("eager", 1, schedule=every) == ["fragment 0     ---------@"]
    assert picture("eager_2", 1, schedule=every) == ["fragment 0     ---------@"]
    streams = {"schedule": {"interval": 8}, "delay": {"steps": 3}}
    assert picture("streaming_diloco", 4, **streams) == [
        "fragment 0     .#--o...",
        "fragment 1     ...#--o.",
        "fragment 2     o....#--",
        "fragment 3     --o....#",
    ]
    assert picture("dreamddp", 4, schedule={"interval": 4}) == [
        "fragment 0     ...@",
        "fragment 1     ..@.",
        "fragment 2     .@..",
        "fragment 3     @...",
    ]
    assert picture("cocktail_sgd", 1) == ["fragment 0     @"]


def test_a_long_period_has_several_steps_per_character_and_equal_fragments_one_line() -> None:
    period = Period(101, 220)
    assert (period.steps_per_column, period.columns) == (2, 60)
    whole = [Transfer(f, 120, 143, 20) for f in range(12)]
    (line,) = draw(whole, 12, period)
    assert line == "fragments 0-11   " + "." * 9 + "#" + "-" * 11 + "o" + "." * 38


def test_all_is_well(tmp_path: Path) -> None:
    config = write(tmp_path)
    before = sorted(tmp_path.iterdir())
    done = doctor(config, "--checkpoints", tmp_path / "saved")
    assert done.exit_code == 0, done.output
    assert not stops(done) and sorted(tmp_path.iterdir()) == before
    ((_, launch),) = marked(done, "launch")
    assert f"deepspeed --num_gpus N --module dsx.run SCRIPT --dsx-config {config}" in launch
    assert "one launcher over all 2 clusters" in launch and "ignored without a word" in launch


def test_without_a_config_it_looks_at_the_machine() -> None:
    done = doctor()
    assert done.exit_code == 0
    assert [line.split()[1] for line in done.stdout.splitlines()][0] == "versions"
    assert f"torch {metadata.version('torch')}" in marked(done, "versions")[0][1]
    assert len(marked(done, "GPUs")) == len(marked(done, "clock")) == 1


def test_every_mistake_of_a_block_is_told_at_once(tmp_path: Path) -> None:
    config = write(
        tmp_path,
        clusters={"num_clusters": 2, "interfaces": "eth0", "rendezvous": "tcp://host"},
        schedule={"interval": 0},
        delay={"type": "blokking", "steps": 3},
        metrics={"trace": True},
        fragmens={},
    )
    done = doctor(config)
    assert done.exit_code == 1
    told = [text for mark, text in marked(done, "block") if mark == "STOP"]
    wrong = ("clusters.interfaces", "rendezvous=", "schedule.interval=0", "delay.type=",
             "metrics.trace=", "fragmens is not a known key")  # fmt: skip
    assert [sum(part in text for text in told) for part in wrong] == [1] * len(wrong), told
    assert len(told) == len(wrong)
    with pytest.raises(ValueError) as first:
        load_config(config)
    assert told[0] == str(first.value)


def test_a_preset_that_is_not_known_hides_no_other_mistake(tmp_path: Path) -> None:
    clusters = {"num_clusters": "two"}
    done = doctor(write(tmp_path, preset="dilocco", clusters=clusters, schedule={"interval": 5}))
    told = " ".join(text for _, text in marked(done, "block"))
    assert "dsx.preset='dilocco'" in told and "dsx.clusters.num_clusters='two'" in told
    assert done.exit_code == 1 and len(stops(done)) == 2


def test_no_block_is_a_stop(tmp_path: Path) -> None:
    (tmp_path / "plain.json").write_text("{}")
    done = doctor(tmp_path / "plain.json")
    assert done.exit_code == 1 and 'no "dsx" block' in stops(done)[0]


def meeting(folder: Path, **clusters: Any) -> tuple[Result, tuple[str, str]]:
    done = doctor(write(folder, clusters={"num_clusters": 2, **clusters}))
    (found,) = marked(done, "rendezvous")
    return done, found


def test_the_port_of_this_host(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        done, (mark, text) = meeting(tmp_path, rendezvous=address)
        assert (done.exit_code, mark) == (1, "STOP") and "or give another port" in text
        for other in ({"store": "standalone"}, {"cluster_id": 1}):
            done, (mark, text) = meeting(tmp_path, rendezvous=address, **other)
            assert (done.exit_code, mark) == (0, "ok") and "somebody listens" in text
    done, (mark, text) = meeting(tmp_path, rendezvous=address)
    assert (done.exit_code, mark) == (0, "ok") and "is free for cluster 0" in text
    done, (mark, text) = meeting(tmp_path, rendezvous=address, store="standalone")
    assert (done.exit_code, mark) == (0, "ok") and "start `dsx rendezvous --port" in text
    ((_, launch),) = marked(done, "launch")
    assert "--dsx-cluster-id M" in launch and "after `dsx rendezvous --port" in launch


def test_an_address_that_is_not_there(tmp_path: Path) -> None:
    done, (mark, text) = meeting(tmp_path, rendezvous="tcp://no.such.host.invalid:29400")
    assert (done.exit_code, mark) == (1, "STOP") and "resolve" in text and "/etc/hosts" in text


def test_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsx.support.doctor import meeting as module

    answers = {"connect": 0}
    monkeypatch.setattr(module, "_is_here", lambda address: False)
    monkeypatch.setattr(module, "_connect", lambda address, port: answers["connect"])
    for problem, mark, words in (
        (0, "ok", "port 29400 answers"),
        (111, "note", "as before cluster 0 is started"),
        (110, "STOP", "open the port in the firewalls"),
        (113, "STOP", "open the port in the firewalls"),
    ):
        answers["connect"] = problem
        done, found = meeting(tmp_path, rendezvous="tcp://127.0.0.1:29400", interface="lo")
        assert found[0] == mark and words in found[1]
        assert done.exit_code == (mark == "STOP")


def test_an_interface_that_is_not_there(tmp_path: Path) -> None:
    done = doctor(write(tmp_path, clusters={"num_clusters": 2, "interface": "eth77"}))
    ((mark, text),) = marked(done, "interface")
    assert (done.exit_code, mark) == (1, "STOP")
    assert "eth77" in text and all(name in text for _, name in socket.if_nameindex())
    name = socket.if_nameindex()[0][1]
    done = doctor(write(tmp_path, clusters={"num_clusters": 2, "interface": name}))
    assert marked(done, "interface") == [("ok", f"{name} is there")]


def test_a_host_name_that_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rendezvous on another host, nobody there could connect back."""
    from dsx.support.doctor import meeting as module

    monkeypatch.setattr(module, "_is_here", lambda address: False)
    monkeypatch.setattr(module, "_connect", lambda address, port: 0)
    monkeypatch.setattr(module, "_resolve", lambda host: ["127.0.1.1"])
    done = doctor(write(tmp_path, clusters={"num_clusters": 2, "rendezvous": "tcp://front:29400"}))
    ((mark, text),) = marked(done, "interface")
    assert (done.exit_code, mark) == (1, "STOP") and "--dsx-interface" in text


def test_over_links_the_way_to_the_other_members_is_looked_for(tmp_path: Path) -> None:
    from dsx.support.doctor.meeting import look_at_meeting

    def found(members: tuple[str, ...], **clusters: Any) -> list[tuple[str, str, str]]:
        own = ClustersConfig(num_clusters=len(members), **clusters)
        said = look_at_meeting(own, LinkConfig(members=members, relay="relay:29500"))
        return [tuple(one) for one in said]

    near = found(("berlin=127.0.0.1:29400", "oslo"), cluster_id=1)
    assert near == [
        ("ok", "rendezvous", "over links the clusters meet at berlin (127.0.0.1:29400)"),
        ("ok", "interface", "lo (127.0.0.1) leads to the other members"),
    ]
    assert [text for _, _, text in found(("berlin", "oslo"))] == [
        "over links the clusters meet at the relay, relay:29500"
    ]
    assert found(("berlin=127.0.0.1:29400", "oslo"), cluster_id=0)[1:] == []
    ((mark, _, text),) = found(("berlin=no.such.host.invalid:1", "oslo"), cluster_id=1)[1:]
    assert mark == "note" and "no way from here to no.such.host.invalid (" in text
    ((mark, _, text),) = found(("berlin=127.0.0.1:1", "oslo"), interface="eth77")[1:]
    assert mark == "STOP" and "clusters.interface='eth77' is none of this host's" in text


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = doctor(write(tmp_path, metrics={"dir": str(tmp_path / "file")}))
    ((mark, text),) = marked(done, "records")
    assert (done.exit_code, mark) == (1, "STOP") and "must be a folder" in text
    done = doctor(write(tmp_path), "--checkpoints", tmp_path / "file" / "below")
    assert done.exit_code == 1 and marked(done, "disk")[0][0] == "STOP"


def model_of(folder: Path) -> tuple[object, ...]:
    (folder / "model.flags").write_text(FLAGS)
    return "--model", folder / "model.flags", "--ranks", 2


def test_memory_is_that_of_dsx_memory(tmp_path: Path) -> None:
    config, model = write(tmp_path), model_of(tmp_path)
    planned = CliRunner().invoke(app, ["memory", *map(str, (config, *model)), "--json"])
    (rank,) = json.loads(planned.stdout)["ranks"]
    for limit, mark, status in ((1, "ok", 0), (rank["on_device"] / 2**30 - 1e-4, "STOP", 1)):
        done = doctor(config, *model, "--limit", limit)
        ((found, text),) = marked(done, "memory")
        assert (found, done.exit_code) == (mark, status)
        assert f"{rank['on_device'] / 2**30:.3g} GiB on its accelerator" in text


def test_disk_holds_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsx.support.doctor import planned as module

    config, model = write(tmp_path, checkpoints={"keep": 3}), model_of(tmp_path)
    whole = from_files(read_model(config, model[1], 2))  # type: ignore[arg-type]
    least = (4 + 4 + 8 + 4 + 4) * whole.numel  # fp32 weights, masters, Adam; anchor, momentum
    usage = type("Usage", (), {})
    for times, mark in ((0.9, "STOP"), (1.9, "STOP"), (3, "note"), (4.5, "ok")):
        usage.free = int(times * least)  # type: ignore[attr-defined]
        monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
        done = doctor(config, *model, "--limit", 1, "--checkpoints", tmp_path)
        assert marked(done, "disk")[0][0] == mark, done.stdout
        assert done.exit_code == (mark == "STOP")


def test_a_model_that_cannot_be_cut_so(tmp_path: Path) -> None:
    config = write(
        tmp_path, preset="streaming_diloco", fragments={"by": "layer", "num_fragments": 9},
        schedule={"interval": 20},
    )  # fmt: skip
    done = doctor(config, *model_of(tmp_path))
    assert done.exit_code == 1 and any("num_fragments=9" in line for line in stops(done))


def test_utilization_is_the_planners(tmp_path: Path) -> None:
    config, model = write(tmp_path), model_of(tmp_path)
    (tmp_path / "link.json").write_text(json.dumps(MEASURED))
    done = doctor(config, *model, "--link", tmp_path / "link.json", "--step-seconds", 0.5)
    method = load_config(config).method
    whole = from_files(read_model(config, model[1], 2))  # type: ignore[arg-type]
    traffic = Traffic(method, whole.loads(method.fragments, method.compression), 2)
    found = predict_traffic(method, traffic, 0.5, Link(1e6, 0.01, payload_share=1), Costs())
    ((_, text),) = marked(done, "line")
    assert f"{100 * found.utilization:.1f} % of the time" in text
    assert f"{found.exposed_seconds:.3g} s wait for the line" in text and done.exit_code == 0


def test_the_cores_of_a_block_are_in_its_utilization(tmp_path: Path) -> None:
    """As in a dry run's: 38.7 % with a core for each fragment, 9.7 with one for all."""
    config, line = tmp_path / "one.flags", tmp_path / "line.json"
    line.write_text(json.dumps({**MEASURED, "bits_per_second": 1e12, "latency_seconds": 0}))
    found: list[str] = []
    for own in ("", "--dsx-coding-cores 1"):
        text = (ROOT / "configs" / "qwen_107b.flags").read_text()
        config.write_text(f"{text}\n--dsx-schedule-interval 10 {own}")
        done = doctor(config, "--link", line, "--step-seconds", 3)
        ((_, told),) = marked(done, "line")
        found.append(told.partition(" % of the time is computing")[0])
    assert found == ["38.7", "9.7"]


@pytest.mark.parametrize(
    ("installed", "words"),
    [({"torch": None}, "torch is not installed"), ({"torch": "2.5.1"}, "pip install 'torch>=2.6'"),
     ({"tensorboard": None}, "tensorboard is not installed"),
     ({"prometheus-client": None}, "prometheus-client is not installed"),
     ({"mlflow-skinny": None, "mlflow": None}, "mlflow is not installed"),
     ({"opentelemetry-sdk": None}, "SDK is not installed")],
)  # fmt: skip
def test_what_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: dict[str, Any], words: str
) -> None:
    real = machine.installed_version
    monkeypatch.setattr(metadata, "requires", lambda name: ["torch>=2.6", "numpy<3,>=1.26"])
    there = dict.fromkeys(("tensorboard", "mlflow", "prometheus-client", "opentelemetry-sdk"), "1")
    found = {**there, **installed}
    monkeypatch.setattr(machine, "installed_version", lambda name: found.get(name, real(name)))
    metrics = {"dir": str(tmp_path / "runs"), "to": ["tensorboard", "mlflow"],
               "prometheus": "127.0.0.1:9464", "otlp": "http://127.0.0.1:4318"}  # fmt: skip
    done = doctor(write(tmp_path, metrics=metrics))
    assert done.exit_code == 1 and len(stops(done)) == 1 and words in stops(done)[0]


def test_versions_of_extras_are_tried_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = machine.installed_version
    other = {"deepspeed": "0.20.1"}
    monkeypatch.setattr(machine, "installed_version", lambda name: other.get(name, real(name)))
    needs = ['deepspeed<0.20,>=0.19; extra == "deepspeed"', "torch>=2.6"]
    monkeypatch.setattr(metadata, "requires", lambda name: needs)
    done = doctor()
    wanted = ("note", "deepspeed 0.20.1 is tried; supported is deepspeed<0.20,>=0.19")
    assert done.exit_code == 0 and marked(done, "versions")[1] == wanted


@pytest.mark.parametrize(("state", "mark"), [(0, "ok"), (5, "note"), (None, "note")])
def test_the_clock(monkeypatch: pytest.MonkeyPatch, state: int | None, mark: str) -> None:
    monkeypatch.setattr(machine, "_clock_state", lambda: state)
    ((found, _),) = marked(doctor(), "clock")
    assert found == mark


def test_the_kernel_is_asked_for_its_clock() -> None:
    state = machine._clock_state()
    assert state is None or 0 <= state <= 5


def test_gpus_are_those_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nfor i in 1 2; do echo 'NVIDIA H100, 81559 MiB, 550.1'; done\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    done = doctor()
    assert "2 x NVIDIA H100, 81559 MiB, 550.1" in marked(done, "GPUs")[0][1]
    has_engine = machine.installed_version("transformer-engine")
    found = " ".join(text for _, text in marked(done, "accelerators"))
    assert ("transformer-engine is not installed: layers are" in found) is not bool(has_engine)
    assert machine.gpu_gib() == 81559 / 1024
    done = doctor(write(tmp_path), *model_of(tmp_path))
    assert marked(done, "memory")[0][0] == "ok" and "79.6 GiB" in marked(done, "memory")[0][1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["gone.json"], "no config file at gone.json"),
        (["--ranks", "2"], "--ranks goes with CONFIG"),
        (["CONFIG", "--ranks", "2"], "--model FILE and --ranks N belong together"),
        (["CONFIG", "--step-seconds", "1"], "--link FILE and --step-seconds T belong together"),
        (["CONFIG", "--limit", "2"], "--limit needs the model"),
        (["CONFIG", "--model", "gone.flags", "--ranks", "2"], "gone.flags"),
    ],
)
def test_bad_input_ends_with_2(tmp_path: Path, options: list[str], words: str) -> None:
    config = str(write(tmp_path))
    done = doctor(*(config if option == "CONFIG" else option for option in options))
    assert done.exit_code == 2 and words in done.stderr and done.stdout == ""


def test_the_screen_in_the_docs_is_printed() -> None:
    """But for what differs from machine to machine, which is cut there by dots."""
    (command, block) = next(
        (a, b)
        for a, b in zip(blocks("docs/launch.md"), blocks("docs/launch.md")[1:], strict=False)
        if a.text.startswith("dsx doctor")
    )
    words = command.commands[0].split()[1:]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0
    printed = lines_of(done)
    expected = unwrapped(block.text)
    assert len(printed) == len(expected), done.stdout
    for line, wanted in zip(printed, expected, strict=True):
        if wanted.endswith(" ..."):
            start = wanted[6:].removesuffix(" ...")  # the mark may differ, too
            assert line[6:].startswith(start), wanted
        else:
            assert line == wanted
