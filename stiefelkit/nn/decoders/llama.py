"""Llama and its like: separate projections, root mean squares, gated MLPs."""

from stiefelkit.nn.decoders import Decoder

LLAMA = Decoder(
    classes=("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "GemmaModel"),
    embeddings=("embed_tokens",),
    blocks="layers",
    norms={
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    },
    writers=("self_attn.o_proj", "mlp.down_proj"),
    final="norm",
    value="self_attn.v_proj",
    output="self_attn.o_proj",
    downs=("mlp.down_proj",),
)
