"""What the papers publish, by run: (what, value, where it stands). And what had to be decided.

Names are those of `settings.read`; a batch is of all clusters. The papers are at hand as text in
which some tables and formulas are lost: a number that is not there is in `DECIDED`, with what it
follows from. Every setting of every file in configs/paper is in one of the two.
"""

from __future__ import annotations

from typing import Any

COCODC, DILOCOX, EAGER = "arXiv:2504.17672", "arXiv:2506.21263", "arXiv:2502.12996"
DREAMDDP, CO2, DILOCO = "arXiv:2502.11058", "arXiv:2401.16265", "arXiv:2311.08105"

Rows = list[tuple[str, Any, str]]

_COCODC: Rows = [
    ("clusters", 4, "IV-A: M = 4 workers"),
    ("layers", 12, "IV-A: 12 decoder layers"),
    ("steps", 18000, "IV-A: 18,000 local training steps"),
    ("optimizer", "AdamW", "IV-A"),
    ("lr", 4e-4, "IV-A"),
    ("weight_decay", 0.1, "IV-A"),
    ("warm_up", 1000, "IV-A"),
    ("decay", "cosine", "IV-A"),
    ("bf16", True, "IV-A"),
    ("batch", 256, "IV-A: global effective batch of 256 sequences"),
    ("sequence", 1024, "IV-A"),
    ("H", 100, "IV-A: for all methods"),
]
_FRAGMENTS: Rows = [
    ("num_fragments", 4, "IV-A: 4 shards of about 3 layers"),
    ("pattern", "strided", "IV-A"),
    ("tau", 5, "IV-A"),
]
_DILOCOX: Rows = [
    ("steps", 4000, "4.1.3: total training step of all experiments"),
    ("H", 125, "4.1.3"),
]
_QWEN: Rows = [
    *_DILOCOX,
    ("preset", "dilocox", "4.1.3"),
    ("rank", 2048, "4.1.3: Low-Rank to 2,048"),
    ("window", 5, "4.1.3: the gradient rank window is set to 5"),
    ("ranks", 160, "4.1.2: 20 nodes of 8"),
    ("factor_wire", "int4", "4.1.3"),
]
_OPT: Rows = [("ranks", 16, "4.1.2: 2 nodes of 8"), ("layers", 24, "OPT-1.3B")]
_COCKTAIL: Rows = [
    ("preset", "cocktail_sgd", "4.1.3"), ("steps", 4000, "4.1.3"),
    ("random_ratio", 0.1, "4.1.3: random sparsification ratio"),
]  # fmt: skip
_EAGER: Rows = [
    ("clusters", 2, "3: 2 DiLoCo replicas"),
    ("H", 30, "Table 6"),
    ("qk_norm", True, "3: QKNorm"),
    ("z_loss", 1e-4, "3: Z-loss with a factor of 1e-4"),
]
_1B: Rows = [
    ("layers", 24, "Table 4"), ("heads", 32, "Table 4"), ("tokens", 25e9, "Table 4"),
    ("tokens_per_step", 25e9 / (0.67 * 3600 / 0.1), "Tables 1 and 5: 0.67 h, 0.1 s a step"),
]  # fmt: skip
_500M: Rows = [
    ("layers", 18, "Table 4"), ("heads", 24, "Table 4"), ("tokens", 11e9, "Table 4"),
]  # fmt: skip
_GPT2: Rows = [
    ("steps", 100_000, "4.2, Fig. 3"),
    ("sequence", 1024, "4.1"),
    ("batch", 480, "4.1"),
    ("warm_up", 4000, "A.3.6"),
    ("decay", "cosine", "Table 10: CosineAnnealingLR"),
    ("preset", "co2", "3"),
    ("granularity", "element", "3.2, eq. 3"),
]
_DREAMDDP: Rows = [
    ("preset", "dreamddp", "3"),
    ("clusters", 8, "Table 1: 8 workers"),
    ("H", 5, "4.5: 5 iterations"),
    ("optimizer", "Adam", "4.1"),
]

PUBLISHED: dict[str, tuple[str, Rows]] = {
    "cocodc/cocodc": (COCODC, [
        *_COCODC, *_FRAGMENTS, ("preset", "cocodc", "II-B"), ("strength", 0.5, "IV-A: lambda"),
        ("gamma", 0.4, "IV-A"), ("mode", "constant", "III-A, eq. 7"),
    ]),
    "cocodc/streaming_diloco": (COCODC, [
        *_COCODC, *_FRAGMENTS, ("preset", "streaming_diloco", "IV-A"),
    ]),
    "cocodc/diloco": (COCODC, [*_COCODC, ("preset", "diloco", "IV-A")]),
    "diloco/diloco": (DILOCO, [
        ("preset", "diloco", "abstract"), ("clusters", 8, "abstract: on 8 workers"),
        ("H", 500, "abstract: communicates 500 times less"),
        ("optimizer", "AdamW", "abstract"),
    ]),
    "dilocox/opt_1.3b": (DILOCOX, [
        *_DILOCOX, *_OPT, ("preset", "dilocox", "4.1.3"), ("wire", "int4", "4.1.3"),
        ("control", "fixed", "4.2.1: not the adaptive algorithm"),
        ("compression_ratio", 500, "4.1.3"),
    ]),
    "dilocox/opendiloco_opt_1.3b": (DILOCOX, [
        *_OPT, ("preset", "opendiloco", "4.1.3"), ("steps", 4000, "4.1.3"), ("H", 500, "4.1.3"),
        ("own_wire", "fp16", "1: FP16 gradient compression"), ("compression_ratio", 500, "4.1.3"),
    ]),
    "dilocox/cocktail_sgd_opt_1.3b": (DILOCOX, [
        *_OPT, *_COCKTAIL, ("top_k_ratio", 0.08, "4.1.3"), ("compression_ratio", 500.0, "4.1.3"),
    ]),
    "dilocox/cocktail_sgd_qwen_107b": (DILOCOX, [
        *_COCKTAIL, ("ranks", 160, "4.1.2"), ("top_k_ratio", 0.04, "4.1.3"),
        ("compression_ratio", 1000.0, "4.1.3"),
    ]),
    "dilocox/qwen_107b_pp80": (DILOCOX, [*_QWEN, ("tensor", 1, "2.2: pipeline parallelism")]),
    "dilocox/qwen_107b_tp8_pp10": (DILOCOX, _QWEN),
    "eager/eager_1b": (EAGER, [
        *_EAGER, *_1B, ("preset", "eager", "Table 6"), ("outer_steps", 1, "Table 6"),
        ("schedule", "streaming", "3: Streaming DiLoCo for all experiments"),
    ]),
    "eager/eager_500m": (EAGER, [
        *_EAGER, *_500M, ("preset", "eager", "Table 2"), ("outer_steps", 1, "Table 2"),
        ("schedule", "streaming", "3"),
    ]),
    "eager/eager_2_outer_steps_500m": (EAGER, [
        *_EAGER, *_500M, ("preset", "eager_2", "Table 2"), ("outer_steps", 2, "Table 2"),
        ("schedule", "streaming", "3"),
    ]),
    "eager/eager_fp4_500m": (EAGER, [
        *_EAGER, *_500M, ("preset", "eager_fp4", "Fig. 7"), ("outer_steps", 1, "Fig. 7"),
        ("schedule", "streaming", "3"), ("own_wire", "fp4_e3m0", "3.4: float4 (of EXMY)"),
    ]),
    "eager/delayed_500m": (EAGER, [
        *_EAGER, *_500M, ("preset", "diloco_delayed", "Table 2, Alg. 2"),
        ("schedule", "streaming", "3"),
    ]),
    "eager/streaming_diloco_500m": (EAGER, [
        *_EAGER, *_500M, ("preset", "streaming_diloco", "Table 2"),
        ("tau", 1, "Table 2: 1-inner-step"),
    ]),
    "eager/diloco_500m": (EAGER, [*_EAGER, *_500M, ("preset", "diloco", "Table 2: no overlap")]),
    "co2/gpt2_small": (CO2, [
        *_GPT2, ("H", 3, "Table 7: tau"), ("clusters", 4, "4.4: four servers"),
        ("parameters", 125e6, "4.1"),
    ]),
    "co2/gpt2_small_cyclic": (CO2, [
        *[row for row in _GPT2 if row[0] != "decay"], ("decay", "triangular2", "A.3.6: CyclicLR"),
        ("H", 3, "Table 7: tau"), ("clusters", 4, "4.4: four servers"),
    ]),
    "co2/gpt2_medium": (CO2, [
        *_GPT2, ("H", 3, "Table 7: tau"), ("clusters", 8, "4.1: eight nodes"),
        ("parameters", 355e6, "4.1"),
    ]),
    "co2/gpt2_large": (CO2, [
        *_GPT2, ("H", 6, "Table 7: tau"), ("clusters", 8, "4.1: eight nodes"),
        ("parameters", 770e6, "4.1"),
    ]),
    "co2/tn_llm_7b": (CO2, [
        ("steps", 100_000, "4.1"), ("clusters", 16, "4.1: sixteen nodes"), ("zero", 2, "4.1"),
        ("H", 12, "Table 7: tau"), ("parameters", 6.7e9, "Table 5"), ("preset", "co2", "3"),
        ("granularity", "element", "3.2, eq. 3"),
    ]),
    "dreamddp/gpt2": (DREAMDDP, _DREAMDDP),
    "dreamddp/resnet18": (DREAMDDP, [
        *_DREAMDDP[:3], ("when", "after", "3.1, eq. 5: what is averaged has been stepped"),
    ]),
    "dreamddp/llama_175m": (DREAMDDP, [*_DREAMDDP, ("parameters", 175e6, "4.1")]),
}  # fmt: skip

_OPTIMIZER = {"beta1": "usual for language models", "beta2": "usual for language models"}
_EVERYWHERE = {
    **_OPTIMIZER,
    "bf16": "usual on these GPUs",
    "clip": "usual",
    "least_lr": "usual: a tenth, or a twentieth",
    "heads": "of the usual size",
    "micro_batch": "what fits",
    "tensor": "not told: none, or within a node",
    "pipeline": "not told",
    "zero": "not told",
    "vocabulary": "of the usual tokenizer",
    "tied": "as the family of models has it",
    "hidden": "the table lost its column: heads of 64, or the size that gives the parameters",
    "outer_lr": "not told: of Streaming DiLoCo and DiLoCo, halved where a round is late",
    "outer_momentum": "not told: as above",
}
DECIDED: dict[str, dict[str, str]] = {
    "cocodc": {"alpha": "not told: Streaming DiLoCo's"},
    "diloco": {
        key: "not in the abstract: Sec. 3 as it is known"
        for key in ("layers", "steps", "warm_up", "lr", "weight_decay", "decay", "batch",
                    "sequence")
    },
    "dilocox": {
        **{key: "Sec. 4.1.1 is lost" for key in (
            "layers", "batch", "sequence", "lr", "warm_up", "decay", "weight_decay", "optimizer",
            "query_groups",
        )},
        "clusters": "not told: 160 GPUs in replicas of 80, 16 in replicas of a node",
        "error_feedback": "Alg. 2 is lost: A.3 has a buffer of compression errors",
        "control": "Alg. 3", "state": "what fits", "max_rank": "the rank it starts from",
    },
    "eager": {
        "sequence": "not told", "batch": "from tokens and steps, see tokens_per_step",
        "steps": "tokens / (batch x sequence)", "lr": "not told", "warm_up": "not told",
        "decay": "not told", "weight_decay": "not told", "optimizer": "2.1: Adam; AdamW, usually",
        "num_fragments": "of three layers, as in Streaming DiLoCo", "by": "the same",
        "pattern": "the same", "alpha": "the same",
    },
    "co2": {
        "lr": "nanoGPT's, on which the experiments build (A.1)", "layers": "GPT-2's",
        "weight_decay": "nanoGPT's", "optimizer": "4.1: Adamw", "sequence": "not told",
        "batch": "not told", "warm_up": "as for GPT-2", "decay": "as for GPT-2",
    },
    "dreamddp": {
        "layers": "GPT-2's, or the size that gives the parameters", "steps": "not told",
        "batch": "not told", "sequence": "not told", "lr": "not told", "weight_decay": "Adam's",
        "decay": "not told: none",
    },
}  # fmt: skip


def decided(paper: str) -> dict[str, str]:
    """Return why a setting of a paper's files is what it is, where the paper does not say."""
    return {**_EVERYWHERE, **DECIDED[paper]}
