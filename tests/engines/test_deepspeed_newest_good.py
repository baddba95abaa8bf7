"""Without a tag DeepSpeed loads the newest good checkpoint that all clusters hold."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tests.distributed import run_distributed
from tests.engines.engines import build_engine, quiet, train_step
from tests.installed import needs

pytestmark = [needs("deepspeed"), pytest.mark.ci]


class Said(logging.Handler):
    """Keeps what dsx says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("dsx").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def save_damage_and_load(base: str) -> tuple[list[str], list[str]]:
    quiet()
    said = Said()
    engine = build_engine((1, "fp32", "one", "adamw", "diloco"))
    cluster, rank = engine.dsx.cluster_id, engine.global_rank
    for step in range(1, 9):
        train_step(engine, step)
        if step % 2:
            continue
        if step == 8 and cluster == 1 and rank == 1:  # whose share others do not see
            state = engine.optimizer.optimizer.state
            next(iter(state.values()))["exp_avg"][0] = torch.nan
        engine.save_checkpoint(base, tag=f"step{step}")
    own = Path(base) / f"cluster_{cluster}"
    if cluster == 0 and rank == 0:
        (own / "step4" / "dsx.json").write_text("{")
    if cluster == 1 and rank == 1:
        (path,) = (own / "step6").glob("*zero_pp_rank_1*optim_states.pt")
        path.write_bytes(path.read_bytes()[:-100])
    engine.dsx.gather(None)
    torch.distributed.barrier()
    messages: list[str] = []
    for tag in ("step6", "step4"):
        try:
            engine.load_checkpoint(base, tag=tag)
        except ValueError as error:
            messages.append(str(error))
    path, _ = engine.load_checkpoint(base)
    messages.append(f"{path} {engine.dsx.step}")
    return messages, [line for line in said.lines if line.startswith("takes")]


def test_what_is_damaged_or_not_finite_is_passed_over(tmp_path: Path) -> None:
    for index, (messages, told) in enumerate(
        run_distributed(save_damage_and_load, 4, str(tmp_path), timeout_seconds=240)
    ):
        at_6, at_4, loaded = messages
        assert at_6.startswith("cluster 1: ") and "bytes were saved" in at_6
        assert "dsx.json cannot be read" in at_4
        assert "cluster_" in loaded and "step2" in loaded and loaded.endswith(" 2")
        assert len(told) == (index % 2 == 0)
        for line in told:
            assert line.startswith("takes checkpoint step2, of step 2, and none that is newer (")
            assert "step8: cluster 1: the inner optimizer's state at step 8: not finite" in line
            assert "step4: cluster 0: " in line and "step6: cluster 1: " in line
