"""Processes: each ends as it was meant to, and what was done to it has the effect that is promised.

One ends by itself with exit status 0, at the end or because it was told to leave; or it was killed.
A cluster that leaves has saved, and has handed over what it had launched. One that is started again
trains with the others. A save without room has failed by name, and later ones have not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dsx.bench.chaos.logs import Rank, Record, Window, last, of_each_process
from dsx.bench.chaos.verdict import Verdict

_KILLS = ("kill_rank", "kill_cluster", "kill_leader")
_SPOILING = ("not_finite", "too_large")
_NO_ROOM = ("No space left on device", "file write failed")  # as Python, and torch, have it

Logs = Mapping[Rank, Sequence[Record]]


def check_processes(
    logs: Logs, windows: Sequence[Window], away: Collection[int], verdict: Verdict
) -> None:
    """Look at how each process has ended; `away` are the clusters that are not there at the end."""
    for (cluster, rank), log in logs.items():
        who = f"cluster {cluster}, rank {rank}"
        processes = of_each_process(log)
        for number, process in enumerate(processes):
            verdict.tell([f"{who}: {trouble}" for trouble in _troubles(process, cluster, windows)])
            steps = [record for record in process if record["what"] == "step"]
            verdict.tell([
                f"{who}: step {after['step']} came behind step {before['step']}"
                for before, after in zip(steps, steps[1:], strict=False)
                if after["step"] != before["step"] + 1
            ])  # fmt: skip
            if number == 0 and steps and steps[0]["step"] != 1:
                verdict.problems.append(f"{who}: the first step was {steps[0]['step']}")
            if number and any(cluster in step["members"] for step in steps):
                verdict.joins += rank == 0
            elif number:
                verdict.problems.append(f"{who}: started again, and never trained with the others")
        if cluster not in away and not last(processes[-1], "end"):
            verdict.problems.append(f"{who}: it was there, and has not come to the end")
    for window in windows:
        own = {of: log for of, log in logs.items() if of[0] == window.cluster}
        if window.kind in _KILLS:
            _check_kill(own, window, verdict)
        if window.kind == "leave":
            _check_leave(own, logs, window, verdict)
        elif window.kind in _SPOILING:
            _check_spoilt(own, window, verdict)
        elif window.kind == "full_disk":
            _check_full_disk(own, window, verdict)
        elif window.kind == "kill_leader":
            _check_leader(own, window, verdict)
        elif window.kind == "join" and not any(
            _is_in(window, record["at"]) for log in own.values() for record in log
            if record["what"] == "begin"
        ):  # fmt: skip
            verdict.problems.append(f"cluster {window.cluster} was to join, and was not started")
    _check_saves(logs, windows, verdict)


def _troubles(process: Sequence[Record], cluster: int, windows: Sequence[Window]) -> list[str]:
    """Say how a process has not ended as it was meant to."""
    ended_at, exit_ = process[-1]["at"], last(process, "exit")
    mine = [
        w for w in windows
        if w.cluster == cluster and process[0]["at"] <= w.begin and _is_in(w, ended_at)
    ]  # fmt: skip
    if any(window.kind in _KILLS for window in mine):
        return []
    if failed := last(process, "failed"):
        return [failed["why"]]
    left = last(process, "left")
    if not left and not last(process, "end"):
        told = "still there" if exit_ is None else f"exit status {exit_['status']}"
        return [f"it has not come to the end, and nobody has killed it: {told}"]
    troubles: list[str] = []
    if exit_ is None:
        troubles.append("it has ended its work, and its process has not ended")
    elif exit_["status"]:
        troubles.append(f"exit status {exit_['status']}, behind the end of its work")
    if left:
        if not any(window.kind == "leave" for window in mine):
            troubles.append("it has left, and nobody has told it to")
        step = last(process, "step")
        # an engine may end inside of a step, before that has been written down
        if step is not None and not {step["step"], step["step"] + 1} & {*left["saved"]}:
            troubles.append(f"it has left at step {step['step']}, and saved at {left['saved']}")
    return troubles


def _check_kill(own: Logs, window: Window, verdict: Verdict) -> None:
    """Look whether all processes of a cluster have ended, as they do not by themselves."""
    for (cluster, rank), log in own.items():
        process = _process_at(log, window.begin)
        exit_ = None if process is None else last(process, "exit")
        if exit_ is None or not exit_["status"] or not _is_in(window, exit_["at"]):
            verdict.problems.append(f"cluster {cluster}, rank {rank}: it was killed, and lives on")


def _check_spoilt(own: Logs, window: Window, verdict: Verdict) -> None:
    """Look whether a cluster has contributed what is wrong, as it was to."""
    for (cluster, rank), log in own.items():
        if not any(
            r["what"] == "launch" and r["is_spoilt"] and _is_in(window, r["at"]) for r in log
        ):
            verdict.problems.append(
                f"cluster {cluster}, rank {rank}: {window.kind}, and it has launched nothing wrong"
            )


def _check_leave(own: Logs, logs: Logs, window: Window, verdict: Verdict) -> None:
    """Look whether a cluster has gone, and the others have averaged all that it had launched."""
    averaged = {
        (record["fragment"], record["step"])
        for log in logs.values() for record in log
        if record["what"] == "refused"
        or (record["what"] == "commit" and window.cluster in record["members"])
    }  # fmt: skip
    for (cluster, rank), log in own.items():
        process = _process_at(log, window.begin)
        if process is None or last(process, "left") is None:
            verdict.problems.append(
                f"cluster {cluster}, rank {rank}: it was told to leave, and has not"
            )
            continue
        launched = {(r["fragment"], r["step"]) for r in process if r["what"] == "launch"}
        verdict.tell([
            f"fragment {fragment}, launch of step {step}: cluster {cluster} has left, and has not "
            "handed it over"
            for fragment, step in sorted(launched - averaged)
        ])  # fmt: skip


def _check_full_disk(own: Logs, window: Window, verdict: Verdict) -> None:
    for (cluster, rank), log in own.items():
        who = f"cluster {cluster}, rank {rank}"
        failed = [r for r in log if r["what"] == "not_saved" and _is_in(window, r["at"])]
        if not failed:
            verdict.problems.append(f"{who}: its disk was full, and no save has failed")
        elif not any(
            r["what"] == "saved" and r["at"] > failed[-1]["at"] and _is_in(window, r["at"])
            for r in log
        ):
            verdict.problems.append(f"{who}: it has not saved again since its disk was full")
        verdict.tell([
            f"{who}: a save without room has failed, and does not say so: {r['why']}"
            for r in failed if not any(words in r["why"] for words in _NO_ROOM)
        ])  # fmt: skip


def _check_saves(logs: Logs, windows: Sequence[Window], verdict: Verdict) -> None:
    """Look for saves that have failed where there was room."""
    for (cluster, rank), log in logs.items():
        full = [w for w in windows if w.kind == "full_disk" and w.cluster == cluster]
        verdict.tell([
            f"cluster {cluster}, rank {rank}: step {r['step']} was not saved: {r['why']}"
            for r in log
            if r["what"] == "not_saved" and not any(_is_in(window, r["at"]) for window in full)
        ])  # fmt: skip


def _check_leader(own: Logs, window: Window, verdict: Verdict) -> None:
    """Look whether who was killed did lead, as it had said last."""
    before = [
        record for (_, rank), log in own.items() if rank == 0
        for record in log if record["what"] == "step" and record["at"] < window.begin
    ]  # fmt: skip
    leads = before[-1]["leader"] if before else None
    if leads != window.cluster:
        verdict.problems.append(f"cluster {window.cluster} was killed as leader; {leads} led then")


def _process_at(log: Sequence[Record], at: float) -> Sequence[Record] | None:
    """Return what the process of a time has written."""
    processes = of_each_process(log)
    return next((p for p in processes if p and p[0]["at"] <= at <= p[-1]["at"]), None)


def _is_in(window: Window, at: float) -> bool:
    return window.begin <= at <= window.end
