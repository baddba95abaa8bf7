"""What is not served is refused before anything is: clusters that wait, data, a model.

Megatron's own parser reads the command line once more, ahead of time. What it cannot know is
looked at where the model is built (model_and_optimizer.py): a script's own arguments and its
defaults for Megatron's, those of a checkpoint (`--use-checkpoint-args`) and of a `--yaml-cfg`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from dsx.comm.cluster_world import backend_of_world
from dsx.config.flags import block_of_flags
from dsx.config.schema import load_config
from dsx.engines.megatron.refusals import captured_by, refuse_arguments, refuse_backend
from dsx.method.schedule.inside_backward import require_before, require_hooks
from megatron_patches import probe

_YAML = "--yaml-cfg"


def refuse_at_once(given: Sequence[str]) -> None:
    """Raise ValueError for what dsx does not serve; `given` has dsx's own flags.

    ConfigError for one of these, SystemExit of Megatron's parser for one of Megatron's.
    """
    when = load_config(block_of_flags(given)).method.schedule.when
    require_before(when, "Megatron")
    if any(word.partition("=")[0] == _YAML for word in sys.argv):
        return
    arguments = _arguments_of_command_line()
    refuse_arguments(arguments)
    require_hooks(when, captured_by(arguments))
    refuse_backend(getattr(arguments, "distributed_backend", None), backend_of_world())


def _arguments_of_command_line() -> Any:
    """Return Megatron's arguments as its parser reads them; those of the script are left aside."""
    parameters = ["extra_args_provider", "ignore_unknown_args"]
    parse = probe.function(probe.module("megatron.training.arguments"), "parse_args", parameters)
    as_given = sys.argv
    # which cluster this is may be known only once the launcher's ranks have been divided
    sys.argv = [word.replace("{cluster_id}", "0") for word in as_given]
    try:
        return parse(ignore_unknown_args=True)
    finally:
        sys.argv = as_given
