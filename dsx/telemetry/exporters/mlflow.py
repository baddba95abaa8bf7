"""MLflow: a run of its own for each cluster and start, in an experiment named after the run.

MLFLOW_TRACKING_URI says where to, MLFLOW_EXPERIMENT_NAME in which experiment; without the first one
it is a database in the run's folder, `mlflow/cluster_<m>.db`, which `mlflow ui` reads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from dsx.telemetry.exporters.sink import Kind, Start, not_installed

NAME = "mlflow"
_MOST_LETTERS = 500  # of a parameter
_MOST_AT_ONCE, _MOST_HELD = 1000, 800  # metrics; the first is MLflow's limit
_MOST_KEPT = 50_000  # metrics, for a server that does not take them now
_SECONDS, _STEP_SECONDS = 10.0, 1.0


class _Run:
    def __init__(self, client: Callable[..., Any], entities: Any, start: Start) -> None:
        place = os.environ.get("MLFLOW_TRACKING_URI")
        if not place:
            file = start.path(NAME).absolute().with_suffix(".db")
            file.parent.mkdir(parents=True, exist_ok=True)
            place = f"sqlite:///{file}"
        self._entities = entities
        self._client = client(tracking_uri=place)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", start.run)
        tags = {"dsx.run": start.run, "dsx.cluster": str(start.cluster)}
        run = self._client.create_run(
            self._experiment(name), tags=tags, run_name=f"{start.run} cluster {start.cluster}"
        )
        self._id: str = run.info.run_id
        self._held: list[Any] = []  # metrics that are logged together: each call takes long
        self._logged_at, self._is_failing = monotonic(), False
        self._step_at = 0.0  # when the last step came that was not left out
        self._left_out: tuple[Mapping[str, float], int, float] | None = None

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:  # another cluster has made it meanwhile
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def describe(self, record: Mapping[str, Any]) -> None:
        """Take what runs as the run's parameters."""
        plain = {k: v for k, v in record.items() if k not in ("parameters", "axes", "kind", "step")}
        for axis, choice in record.get("axes", {}).items():
            plain |= {f"{axis}.{key}": value for key, value in choice.items()}
        parameters = [
            self._entities.Param(key, str(value)[:_MOST_LETTERS]) for key, value in plain.items()
        ]
        self._client.log_batch(self._id, params=parameters)

    def write(self, numbers: Mapping[str, float], step: int, time: float) -> None:
        """Log the numbers of some seconds at once; what is not finite MLflow does not take.

        Of steps that take less than a second some are left out, and not the last one: a number
        costs MLflow's database milliseconds, which training has to share.
        """
        if next(iter(numbers)).startswith("step/"):
            self._left_out = None
            if time < self._step_at + _STEP_SECONDS:
                self._left_out = numbers, step, time
                return
            self._step_at = time
        self._take(numbers, step, time)

    def _take(self, numbers: Mapping[str, float], step: int, time: float) -> None:
        at = int(1000 * time)
        self._held += [
            self._entities.Metric(name, float(value), at, step)
            for name, value in numbers.items()
            if math.isfinite(value)
        ]
        is_full = len(self._held) >= _MOST_HELD and not self._is_failing
        if is_full or monotonic() > self._logged_at + _SECONDS:
            self._log()

    def _log(self) -> None:
        """Log what is held; what is not taken is held on, the newest of it."""
        self._logged_at, self._is_failing = monotonic(), True
        del self._held[:-_MOST_KEPT]
        while self._held:
            self._client.log_batch(self._id, metrics=self._held[:_MOST_AT_ONCE])
            del self._held[:_MOST_AT_ONCE]
        self._is_failing = False

    def close(self) -> None:
        """End the run."""
        if self._left_out is not None:
            self._take(*self._left_out)
        try:
            self._log()
        finally:
            self._client.set_terminated(self._id)


def find() -> Kind:
    """Return the kind; ModuleNotFoundError without the library."""
    try:
        import alembic  # with sqlalchemy it keeps the database
        import sqlalchemy
        from mlflow import MlflowClient, entities
    except ImportError as error:
        raise ModuleNotFoundError(not_installed(NAME, "mlflow", "mlflow")) from error
    del alembic, sqlalchemy
    return Kind(NAME, lambda start: _Run(MlflowClient, entities, start))
