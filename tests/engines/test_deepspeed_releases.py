"""What dsx does with a release of DeepSpeed, whichever: every stage trains, is stopped and goes on.

For scripts/matrix.sh, which runs it with releases that are not installed here. The same on what is
installed is tested by kind in the other files.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsx.engines.deepspeed.features import (
    leaves_out_a_micro_batch,
    reads_before_it_has_come,
    steps_with_autograd,
)
from tests.distributed import run_distributed
from tests.engines.engines import (
    Kind,
    build_engine,
    ds_config,
    quiet,
    reference,
    train_step,
    weights,
)
from tests.installed import needs

pytestmark = [needs("deepspeed"), pytest.mark.ci]

NUM_STEPS, SAVED_AT = 14, 6  # more than three outer rounds of H = 4; a transfer is under way
KINDS = [
    Kind(0, groups="two", optimizer="adamw"),
    Kind(0, "bf16", groups="two", optimizer="fused"),
    Kind(1, groups="two", optimizer="adamw"),
    Kind(1, "bf16", groups="two", optimizer="adamw", preset="dilocox"),
    Kind(1, "bf16+fp32", groups="two", optimizer="adamw"),
    Kind(2, groups="two", optimizer="adamw", zero=("offload",)),
    Kind(3, groups="two", optimizer="adamw"),
    Kind(3, "bf16", groups="two", optimizer="adamw", zero=("sub_groups", "some_persistent")),
]


def train_and_go_on(base: str, kind: Kind) -> dict[str, Any]:
    """Train with a save on the way, then once more from there; or tell what was refused."""
    block = ds_config(kind.stage, kind.precision, kind.preset)["dsx"]
    block["clusters"]["deadline_seconds"] = 240  # several engines are built on few cores
    try:
        engine = build_engine(kind, dsx=block)
    except ValueError as error:
        return {"refused": str(error)}
    result: dict[str, Any] = {"cluster": engine.dsx.cluster_id, "refused": ""}
    for step in range(1, NUM_STEPS + 1):
        train_step(engine, step)
        if step == SAVED_AT:
            result["in_flight"] = len(engine.dsx.loop.in_flight)
            engine.save_checkpoint(base)
    whole = weights(engine)
    result["anchors"] = [anchor.clone().numpy() for anchor in engine.dsx.loop.state.anchor]
    engine.dsx.close()
    engine.destroy()
    engine = build_engine(kind, dsx=block)
    engine.load_checkpoint(base)
    result["from"] = engine.dsx.step
    for step in range(engine.dsx.step + 1, NUM_STEPS + 1):
        train_step(engine, step)
    result["is_equal"] = all(whole[name].equal(w) for name, w in weights(engine).items())
    result["weights"] = {name: w.numpy() for name, w in whole.items()}
    engine.dsx.close()
    engine.destroy()
    return result


def train_all(base: str) -> list[dict[str, Any]]:
    quiet()
    return [train_and_go_on(f"{base}/{index}", kind) for index, kind in enumerate(KINDS)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    base = str(tmp_path_factory.mktemp("releases"))
    return run_distributed(train_all, 4, base, timeout_seconds=800)


def name_of(kind: Kind) -> str:
    return f"{kind.stage}-{kind.precision}-{kind.optimizer}"


def is_refused(kind: Kind) -> bool:
    """Whether the release that is installed is one of which dsx refuses this over gloo."""
    import deepspeed

    version = deepspeed.__version__
    if kind.stage == 3:
        return reads_before_it_has_come(version, "gloo", 2)
    if kind.precision == "bf16+fp32":
        return leaves_out_a_micro_batch(version)
    return kind.stage in (1, 2) and steps_with_autograd(version, "gloo")


def results_of(kind: Kind, trained: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    results = [rank[KINDS.index(kind)] for rank in trained]
    if is_refused(kind):
        pytest.skip("refused by name, which is a test of its own")
    assert not any(result["refused"] for result in results), results[0]["refused"]
    return results


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_a_release_trains_as_the_reference(kind: Kind, trained: list[list[dict[str, Any]]]) -> None:
    results = results_of(kind, trained)
    expected = reference(kind, NUM_STEPS)
    most = 2e-2 if kind.precision != "fp32" else 1e-6
    for result in results:
        for name, value in expected[result["cluster"]].items():
            got = torch.from_numpy(result["weights"][name])
            torch.testing.assert_close(got, value, rtol=0, atol=most, msg=name)
    for shard in range(2):  # bit for bit across clusters
        pairs = zip(results[shard]["anchors"], results[shard + 2]["anchors"], strict=True)
        assert all((a == b).all() for a, b in pairs)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_a_release_goes_on_bit_for_bit(kind: Kind, trained: list[list[dict[str, Any]]]) -> None:
    results = results_of(kind, trained)
    assert all(result["is_equal"] and result["from"] == SAVED_AT for result in results)
    assert max(result["in_flight"] for result in results) >= 1


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_a_release_is_refused_by_name(kind: Kind, trained: list[list[dict[str, Any]]]) -> None:
    if not is_refused(kind):
        pytest.skip("this release is served")
    import deepspeed

    for rank in trained:
        said = rank[KINDS.index(kind)]["refused"]
        release = f"ZeRO-{kind.stage} on CPUs (gloo) with release {deepspeed.__version__}"
        if kind.precision == "bf16+fp32":
            release = f"data_types.grad_accum_dtype='fp32' of {deepspeed.__version__}"
        assert release in said and "install deepspeed>=0.19" in said
