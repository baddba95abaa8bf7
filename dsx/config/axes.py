"""The axes of a method as pydantic sees them: a model per registered choice, told apart by name.

The models are made from the dataclasses of the choices, so that the keys of the configuration are
their fields and there is one schema, for what ships and for what is registered from outside.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from dsx.config.errors import explain_choice
from dsx.config.files import ConfigError
from dsx.method.choices import AXES

_STRICT = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


def read_choice(
    axis: str, values: Mapping[str, Any], usual: Mapping[str, Any]
) -> tuple[dict[str, Any], Any]:
    """Return what an axis says, complete, as plain values and as the choice itself.

    `values` names a choice by the axis's selector; `usual` is what they are if left out. Raises
    ConfigError for a name or a key that is not known, one that is missing, and a value of another
    type.
    """
    selector, choices = AXES[axis]
    text = json.dumps(dict(values))
    try:
        model = _union(axis, tuple(choices.items())).validate_json(text)
    except ValidationError as error:
        called = values[selector]
        kind = choices.get(called) if isinstance(called, str) else None
        limited = choice_model(axis, called, kind, has_limits=True) if kind else None
        message = explain_choice(error, axis, values, selector, [*choices], limited, usual)
        raise ConfigError(message) from error
    name = getattr(model, selector)
    kind = choices[name]
    choice = kind(**{field.name: getattr(model, field.name) for field in dataclasses.fields(kind)})
    return {selector: name, **dataclasses.asdict(choice)}, choice


def choice_model(
    axis: str, name: str, kind: type[Any], has_limits: bool = False
) -> type[BaseModel]:
    """Return the model of one choice: its selector, and the fields of its dataclass.

    Limits of numbers are left to the choice's own `validate` when one is read, whose words say why.
    """
    hints = get_type_hints(kind, include_extras=has_limits)
    fields: dict[str, Any] = {AXES[axis].selector: (Literal[name], name)}
    for field in dataclasses.fields(kind):
        default: Any = ... if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        fields[field.name] = (hints[field.name], default)
    return create_model(f"{axis}_{name}", __config__=_STRICT, **fields)


@lru_cache(maxsize=64)
def _union(axis: str, choices: tuple[tuple[str, type[Any]], ...]) -> TypeAdapter[Any]:
    models = tuple(choice_model(axis, name, kind) for name, kind in choices)
    union: Any = Union[models]  # noqa: UP007 - of a tuple
    selector = Field(discriminator=AXES[axis].selector)
    return TypeAdapter(Annotated[union, selector])  # pyright: ignore
