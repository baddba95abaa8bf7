"""Models of an encoder, and of an encoder and a decoder: parameters' names, and their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed import run_distributed
from tests.engines.megatrons import needs_megatron

pytestmark = needs_megatron

# as modules are registered there, the head before what it stands behind
BERT = [
    "embedding.word_embeddings.weight", "embedding.tokentype_embeddings.weight",
    "encoder.layers.0.mlp.weight", "encoder.layers.1.mlp.weight", "encoder.final_layernorm.weight",
    "lm_head.dense.weight", "output_layer.bias", "binary_head.weight", "pooler.dense.weight",
]  # fmt: skip
T5 = [
    "lm_head.output_layer.bias", "embedding.word_embeddings.weight",
    "encoder_relative_pos_emb.relative_attention_bias.weight",
    "decoder.layers.0.cross_attention.weight", "decoder.layers.1.mlp.weight",
    "decoder.final_layernorm.weight",
    "encoder.layers.0.mlp.weight", "encoder.layers.1.mlp.weight", "encoder.final_layernorm.weight",
]  # fmt: skip
MTP = [
    "embedding.word_embeddings.weight", "decoder.layers.0.mlp.weight",
    "decoder.final_layernorm.weight", "mtp.layers.0.transformer_layer.mlp.weight",
    "output_layer.weight",
]  # fmt: skip
OWN = [
    "vision_model.layers.0.mlp.weight", "vision_projection.weight",
    "language_model.embedding.word_embeddings.weight",
    "language_model.decoder.layers.0.mlp.weight",
]  # fmt: skip
IN_ORDER = [T5[i] for i in (1, 2, 6, 7, 8, 3, 4, 5, 0)]


def model_of(names: list[str], first_layer: int = 0) -> Any:
    """A model of these parameters, as modules in modules; layers count from `first_layer`."""
    model = nn.Module()
    for name in names:
        module = model
        *path, last = name.split(".")
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
            if part.isdigit():
                module.layer_number = 1 + first_layer + int(part)  # type: ignore[assignment]
        module.register_parameter(last, nn.Parameter(torch.zeros(2)))
    return model


def name_everything() -> dict[str, Any]:
    from dsx.bench.megatron_on_cpu import install

    install()
    from dsx.engines.megatron.model_notes import NoteTaker
    from dsx.engines.megatron.parameters import Coordinates, name_parameters
    from dsx.method.fragments import group_by_layer

    def listed(model: Any, stage: int, stages: int) -> list[Any]:
        place = Coordinates((0, 1), (stage, stages), (0, 1))
        return name_parameters([model], list(model.parameters()), place)

    def named(model: Any, stages: int = 1) -> list[str]:
        return [p.name for p in listed(model, 0, stages)]

    def copies(model: Any, stage: int) -> list[str]:
        return [p.name for p in listed(model, stage, 2) if p.is_tied_copy]

    from dsx.core.types import ParameterShape

    two = model_of(T5)
    two.add_encoder = two.add_decoder = True
    names = named(two)
    with pytest.raises(ValueError) as refused:
        named(two, stages=2)
    more = model_of(MTP)
    more.mtp_process = True
    found = {"mtp": named(more), "copies": (copies(more, 0), copies(more, 1))}
    more.share_embeddings_and_output_weights = True
    with pytest.raises(ValueError) as twice:
        copies(more, 1)
    vision = model_of(OWN)
    with pytest.raises(ValueError) as apart:
        named(vision, stages=2)
    with pytest.raises(ValueError) as rows:
        NoteTaker([vision], [], vocab_size=40)
    last = model_of(["encoder.layers.0.mlp.weight", "lm_head.dense.weight"], first_layer=3)
    return {
        **found,
        "refused mtp": str(twice.value),
        "own": named(vision),
        "refused own": str(apart.value),
        "refused rows": str(rows.value),
        "bert": named(model_of(BERT)),
        "last stage": named(last, stages=2),
        "t5": names,
        "layers": group_by_layer([ParameterShape(name, (2,), "float32") for name in names]),
        "refused": str(refused.value),
    }


def test_encoders_and_decoders_have_their_places() -> None:
    (found,) = run_distributed(name_everything, 1, engine="megatron")
    assert found["bert"] == BERT
    assert found["last stage"] == ["encoder.layers.3.mlp.weight", "lm_head.dense.weight"]
    assert found["t5"] == IN_ORDER
    assert [len(layer) for layer in found["layers"]] == [3, 2, 1, 3]  # two of each part
    assert found["mtp"] == MTP
    assert found["own"] == OWN
    assert "place of parameter vision_model.layers.0.mlp.weight of Mod" in found["refused own"]
    assert "On one stage any model is served" in found["refused own"]
    assert "vocab_size=40: a Module has no vocab_size" in found["refused rows"]
    assert found["copies"] == ([], [MTP[0]])
    assert "dsx does not serve mtp_num_layers over 2 pipeline stages" in found["refused mtp"]
    assert "dsx does not serve Module over 2 pipeline stages" in found["refused"]
