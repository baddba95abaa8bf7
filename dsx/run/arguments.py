"""What stands on a rank's command line: flags of dsx, the script, and the script's own arguments.

`--dsx-*` flags may stand anywhere and are taken away before the script's parser sees them.
`deepspeed` puts `--local_rank=N` before the script's name; the script gets it, as without dsx.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsx.config.files import ConfigError

PREFIX = "--dsx-"
USAGE = """\
usage: python -m dsx.run [--dsx-config FILE] [--dsx-KEY VALUE ...] SCRIPT [arguments]
       python -m dsx.run [--dsx-config FILE] [--dsx-KEY VALUE ...] -m MODULE [arguments]

Started by a launcher in place of the script: deepspeed --module dsx.run SCRIPT, torchrun -m
dsx.run SCRIPT, accelerate launch -m dsx.run SCRIPT, srun or mpirun python -m dsx.run SCRIPT.
The "dsx" block is that of --dsx-config, of DSX_CONFIG, of a JSON among the script's arguments, or
of accelerate's DeepSpeed config; every key of it is a flag, --dsx-schedule-interval 50, or a
variable, DSX_SCHEDULE_INTERVAL=50. {cluster_id} in an argument becomes the cluster's number."""


@dataclass(frozen=True)
class CommandLine:
    """What a launcher has given a rank; `flags` are those of dsx, each with its value."""

    script: str
    is_module: bool
    arguments: tuple[str, ...]
    flags: tuple[str, ...]


def split(given: Sequence[str]) -> CommandLine:
    """Tell apart what is whose; ConfigError if there is no script, or a flag has no value."""
    flags, rest = _take_flags(given)
    of_launcher: list[str] = []
    while rest and rest[0].startswith(("--local_rank=", "--local-rank=")):
        of_launcher.append(rest.pop(0))
    is_module = rest[:1] == ["-m"]
    rest = rest[1:] if is_module else rest
    if not rest or rest[0].startswith("-"):
        found = f"{rest[0]} where its name should be" if rest else "nothing behind dsx.run"
        raise ConfigError(f"no script to run, {found}: give SCRIPT, or -m MODULE\n\n{USAGE}")
    return CommandLine(rest[0], is_module, (*of_launcher, *rest[1:]), tuple(flags))


def _take_flags(given: Sequence[str]) -> tuple[list[str], list[str]]:
    flags: list[str] = []
    left: list[str] = []
    arguments = iter(given)
    for argument in arguments:
        if not argument.startswith(PREFIX):
            left.append(argument)
            continue
        name, equals, value = argument.partition("=")
        if not equals:
            value = next(arguments, None)
            if value is None:
                raise ConfigError(f"{name} has no value; write {name}=VALUE")
        flags.append(f"{name}={value}")
    return flags, left


def with_cluster_id(arguments: Sequence[str], cluster_id: int | None) -> list[str]:
    """Return arguments with the number of this cluster where they say {cluster_id}.

    ConfigError where that is not known before the script runs.
    """
    asking = [argument for argument in arguments if "{cluster_id}" in argument]
    if asking and cluster_id is None:
        raise ConfigError(
            f"{asking[0]}: which cluster this is, is not known before the script has shown its "
            '"dsx" block; give --dsx-config FILE'
        )
    return [argument.replace("{cluster_id}", str(cluster_id)) for argument in arguments]
