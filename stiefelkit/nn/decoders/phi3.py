"""Phi-3: one layer for queries, keys and values, one for gate and up."""

from stiefelkit.nn.decoders import Decoder

PHI3 = Decoder(
    classes=("Phi3Model",),
    embeddings=("embed_tokens",),
    blocks="layers",
    norms={"input_layernorm": ("self_attn.qkv_proj",), "post_attention_layernorm": ("mlp.gate_up_proj",)},
    writers=("self_attn.o_proj", "mlp.down_proj"),
    final="norm",
    value="self_attn.qkv_proj",
    output="self_attn.o_proj",
    values="last",
    downs=("mlp.down_proj",),
)
