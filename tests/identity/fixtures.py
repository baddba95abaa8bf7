"""Make tests/fixtures/checkpoint_NAME and run_NAME: the files that a release leaves behind.

They are made by the release's own code, once, and not again by a later one, for that would test
nothing. From a checkout with this script, TREE being a checkout of the release:

    PYTHONPATH=TREE python tests/identity/fixtures.py tests/fixtures 0.2.0

NAME is the version, and for 0.1.0 the commit that was taken for it, 2317291. A folder of records is
made with `--run` behind that.
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


def make_run(base: str, name: str) -> None:
    """Leave the records and traces of a short run with a codec, in a folder of this name."""
    import dsx

    os.chdir(base)  # a directory's name is in no record
    config: dict[str, Any] = block(
        PRESETS["streaming_diloco"],
        old_checkpoint.NUM_CLUSTERS,
        name,
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
        Path(name, "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def main(base: Path, name: str, with_run: bool) -> None:
    directory = base / f"checkpoint_{name}"
    run_ranks(make_checkpoints, old_checkpoint.NUM_CLUSTERS, str(directory), timeout_seconds=900)
    if with_run:
        given = (str(base.resolve()), f"run_{name}")
        run_ranks(make_run, old_checkpoint.NUM_CLUSTERS, *given, timeout_seconds=900)
    for path in directory.rglob("zero_to_*.py"):  # scripts that DeepSpeed leaves, 60 kB
        path.unlink()
    ends = {
        str(path.relative_to(directory)): digest(load_file(path))
        for path in sorted(directory.rglob("end_of_cluster_*.safetensors"))
    }
    made = {"commit": name, "machine": old_checkpoint.machine(), "ends": ends}
    (directory / "made.json").write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], "--run" in sys.argv[3:])
