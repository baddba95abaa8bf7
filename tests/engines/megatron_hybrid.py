"""Megatron's hybrid models on a CPU: Mamba layers, attention and MLPs, by the letters of a pattern.

Megatron's own specification has Transformer Engine's layers alone; this one has those of
megatron-core. The mixer is Megatron's, its kernels are a stand-in (tests/stand_ins/mamba_ssm).
"""

from __future__ import annotations

import sys
from typing import Any

import megatron.core.ssm.mamba_block as mamba_block
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

PATTERN = "M*-M"

# the final norm is not in the specification; from core 0.18 on its file is another
sys.modules[mamba_block.MambaStack.__module__].TENorm = WrappedTorchNorm  # type: ignore[attr-defined]
_mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
_attention = SelfAttentionSubmodules(
    linear_qkv=ColumnParallelLinear,
    core_attention=DotProductAttention,
    linear_proj=RowParallelLinear,
)
_experts = get_moe_module_spec(use_te=False, num_experts=1)  # how many a model has its flags tell
_mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
stack_spec = ModuleSpec(
    module=mamba_block.MambaStack,
    submodules=mamba_block.MambaStackSubmodules(
        mamba_layer=ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=WrappedTorchNorm,
                mixer=ModuleSpec(module=MambaMixer, submodules=_mixer),
                mamba_bda=get_bias_dropout_add,
            ),
        ),
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=WrappedTorchNorm,
                self_attention=ModuleSpec(
                    module=SelfAttention,
                    params={"attn_mask_type": AttnMaskType.causal},
                    submodules=_attention,
                ),
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm,
                mlp=ModuleSpec(module=MLP, submodules=_mlp),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
        moe_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm,
                mlp=_experts,
                mlp_bda=get_bias_dropout_add,
            ),
        ),
    ),
)


def build_hybrid(config: Any, **common: Any) -> Any:
    """Return a chunk of a hybrid model; `common` are what all models take."""
    from megatron.core.models.mamba import MambaModel
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    common.update(hybrid_override_pattern=PATTERN, position_embedding_type="learned_absolute")
    return MambaModel(config, stack_spec, pg_collection=groups, **common)
