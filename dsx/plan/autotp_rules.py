"""Which weights DeepSpeed's AutoTP cuts, by the `tensor_parallel` section of its JSON.

What a plan is made of has the names of a Hugging Face decoder (autotp_weights.py). They are matched
as DeepSpeed does (0.19): patterns of `partition_config` in order, then those of `preset_model`;
without both the plan that Hugging Face gives its decoders, and DeepSpeed takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

# of transformers' Llama, Mistral, Qwen2 and Qwen3, whose head is not the embedding
HUGGING_FACE = {
    **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in ("q", "k", "v")},
    "model.layers.*.self_attn.o_proj": "rowwise",
    **{f"model.layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_rep",
}
_DIMENSION = {"column": 0, "row": 1, "skip": None}
_OF_LAYERS = (
    (r".*\.self_attn\.o_proj\.weight$", 1),
    (r".*\.self_attn\.[qkv]_proj\.weight$", 0),
    (r".*\.mlp\.down_proj\.weight$", 1),
    (r".*\.mlp\.(up|gate)_proj\.weight$", 0),
)
PRESETS = ("llama", "qwen2")  # which are the same; others have names of their own


class Rule(NamedTuple):
    """What begins a weight's name; the dimension that is cut, if any; whether outputs are whole."""

    pattern: str
    split: int | None
    is_gathered: bool = False


@dataclass(frozen=True)
class Slices:
    """Over how many ranks weights are cut, and which ones: the first rule that matches counts.

    `is_by_class`: by the plan of Hugging Face's class, nothing else being said. `is_strict`: every
    matrix has to have a rule.
    """

    ranks: int
    rules: tuple[Rule, ...]
    is_by_class: bool = False
    is_strict: bool = False

    def rule_of(self, name: str) -> Rule | None:
        """Return what holds of a weight."""
        return next((rule for rule in self.rules if re.match(rule.pattern, name)), None)


def read_slices(section: Mapping[str, Any]) -> Slices | None:
    """Read `tensor_parallel`, None where it cuts nothing; ValueError for what is not planned."""
    size = section.get("autotp_size", 0)
    if not isinstance(size, int) or isinstance(size, bool):
        raise ValueError(f"tensor_parallel.autotp_size={size!r} must be an integer")
    if size <= 1:
        return None
    _refuse(section, size)
    preset, own = section.get("preset_model"), section.get("partition_config")
    if preset is None and own is None:
        rules = [_of_hugging_face(*entry) for entry in HUGGING_FACE.items()]
        return Slices(size, tuple(rules), is_by_class=True)
    found: list[Rule] = []
    if own is not None:
        found += _own_rules(_object("tensor_parallel.partition_config", own))
    if preset is not None and (own is None or own.get("use_default_specs", True)):
        found += [Rule(pattern, split) for pattern, split in _OF_LAYERS]
    return Slices(size, tuple(found), is_strict=bool(own and own.get("strict_mode")))


def _refuse(section: Mapping[str, Any], size: int) -> None:
    preset = section.get("preset_model")
    if preset not in (None, *PRESETS):
        raise ValueError(
            f"tensor_parallel.preset_model={preset!r}: dsx plans models with the names of a "
            f"Hugging Face decoder, which are those of {' and '.join(PRESETS)}; write one of them, "
            "or partition_config"
        )
    if section.get("vocab_parallel_lm_head"):
        raise ValueError(
            "tensor_parallel.vocab_parallel_lm_head=true: dsx plans no head and embedding that are "
            "cut by the vocabulary; leave it out to see the rest of the run"
        )
    own = section.get("tp", section.get("tensor_parallel", {}))
    for name, served in (("tp_size", (1, size)), ("tp_grain_size", (1,))):
        value = _object("tensor_parallel.tp", own).get(name, 1)
        if value not in served:
            raise ValueError(
                f"tensor_parallel.tp.{name}={value!r} must be {' or '.join(map(str, served))} in "
                "what dsx plans; leave it out"
            )


def _own_rules(config: Mapping[str, Any]) -> list[Rule]:
    found: list[Rule] = []
    specs = config.get("layer_specs", [])
    if not isinstance(specs, list):
        raise ValueError(f"tensor_parallel.partition_config.layer_specs={specs!r} must be a list")
    for number, spec in enumerate(cast("list[Any]", specs)):
        where = f"tensor_parallel.partition_config.layer_specs[{number}]"
        spec = _object(where, spec)
        for name in ("shape", "partition_dim", "model_types"):
            if spec.get(name) is not None:
                raise ValueError(
                    f"{where}.{name}={spec[name]!r}: dsx plans models whose matrices hold one "
                    "thing each, cut by columns or rows; leave it out"
                )
        kind = str(spec.get("partition_type", "column")).lower()
        if kind not in _DIMENSION:
            raise ValueError(f"{where}.partition_type={kind!r} must be one of {list(_DIMENSION)}")
        for pattern in _patterns(where, spec.get("patterns", [])):
            found.append(Rule(pattern, _DIMENSION[kind], bool(spec.get("gather_output"))))
    return found


def _patterns(where: str, patterns: Any) -> Sequence[str]:
    try:
        for pattern in patterns:
            re.compile(pattern)
    except (TypeError, re.error) as error:
        raise ValueError(
            f"{where}.patterns={patterns!r} must be a list of regular expressions ({error})"
        ) from None
    return patterns


def _of_hugging_face(pattern: str, style: str) -> Rule:
    """Return an entry of a plan as DeepSpeed converts it."""
    expression = ".*" + pattern.replace(".", r"\.").replace("*", ".*") + r"\.weight$"
    return Rule(expression, 1 if style == "rowwise" else 0, style == "colwise_rep")


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r} must be an object, as in DeepSpeed's JSON: {{...}}")
    return cast("Mapping[str, Any]", value)
