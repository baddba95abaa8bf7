"""Every wire format by its name: the table that configurations and `dsx bench codec` read."""

from __future__ import annotations

from dsx.compress.wire.base import Wire
from dsx.compress.wire.casts import BF16, FP16, FP32
from dsx.compress.wire.group_formats import FP4E2M1, FP4E3M0, FP8, Int4, Int8, Ternary

FORMATS: dict[str, type[Wire]] = {
    "fp32": FP32,
    "bf16": BF16,
    "fp16": FP16,
    "int8": Int8,
    "int4": Int4,
    "fp8": FP8,
    "fp4_e2m1": FP4E2M1,
    "fp4_e3m0": FP4E3M0,
    "ternary": Ternary,
}
