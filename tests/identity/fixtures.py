"""Make tests/fixtures/checkpoint_2317291 and run_2317291: the files that 0.1.0 leaves behind.

They were made by commit 2317291, and are not to be made again by a later one, for that would test
nothing. From a checkout with this script, TREE being a checkout of 2317291:

    PYTHONPATH=TREE python tests/identity/fixtures.py tests/fixtures
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).resolve().parents[1]))

from identity import old_checkpoint
from identity.evidence import digest
from identity.models import LAST_STEP, PRESETS, Net, adamw, batch, block
from identity.ranks import run_ranks

COMMIT = "2317291"
RUN_STEPS, RUN_INTERVAL, TOKENS = 40, 10, 108


def make_checkpoints(base: str) -> None:
    """Save every row at its stop, and what it comes to in the end."""
    for name in [*PRESETS, old_checkpoint.DEEPSPEED]:
        directory, stop = Path(base) / name, old_checkpoint.stop_of(name)
        trainer = old_checkpoint.start(name)
        trainer.train(1, stop)
        trainer.save(directory)
        weights = trainer.train(stop + 1, LAST_STEP)
        save_file(weights, directory / f"end_of_cluster_{trainer.cluster}.safetensors")
        trainer.handle.close()


def make_run(base: str) -> None:
    """Leave the records and traces of a short run with a codec, in `run_2317291`."""
    import dsx

    os.chdir(base)  # a directory's name is in no record
    config: dict[str, Any] = block(
        PRESETS["streaming_diloco"],
        old_checkpoint.NUM_CLUSTERS,
        f"run_{COMMIT}",
        schedule={"interval": RUN_INTERVAL},
        compression={"type": "quantized", "wire": "int4", "error_feedback": "bf16"},
    )
    config["dsx"]["metrics"] |= {"trace": True, "trace_steps": [9, 12]}
    cluster = old_checkpoint.join(config).cluster_id
    model = Net(cluster)
    optimizer = adamw(model)
    handle = dsx.attach(model, optimizer, config=config)
    for step in range(1, RUN_STEPS + 1):
        optimizer.zero_grad()
        loss = model(*batch(cluster, step))
        loss.backward()
        optimizer.step()
        handle.log_step(loss=loss.item(), tokens=TOKENS)
    handle.finish()
    losses = handle.gather(model(*batch(cluster, RUN_STEPS + 1)).item())
    handle.log("validation", loss=losses[cluster])
    handle.close()
    if not cluster:
        summary = {"steps": RUN_STEPS, "val_loss_clusters": losses}
        Path(f"run_{COMMIT}/summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def main(base: Path) -> None:
    directory = base / f"checkpoint_{COMMIT}"
    run_ranks(make_checkpoints, old_checkpoint.NUM_CLUSTERS, str(directory), timeout_seconds=900)
    run_ranks(make_run, old_checkpoint.NUM_CLUSTERS, str(base.resolve()), timeout_seconds=900)
    for path in directory.rglob("zero_to_*.py"):  # scripts that DeepSpeed leaves, 60 kB
        path.unlink()
    ends = {
        str(path.relative_to(directory)): digest(load_file(path))
        for path in sorted(directory.rglob("end_of_cluster_*.safetensors"))
    }
    made = {"commit": COMMIT, "machine": old_checkpoint.machine(), "ends": ends}
    (directory / "made.json").write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
