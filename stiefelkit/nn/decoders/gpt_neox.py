"""GPT-NeoX and Pythia: layer norms, queries, keys and values of each head together, attention beside the MLP."""

from stiefelkit.nn.decoders import Decoder

GPT_NEOX = Decoder(
    classes=("GPTNeoXModel",),
    embeddings=("embed_in",),
    blocks="layers",
    norms={"input_layernorm": ("attention.query_key_value",), "post_attention_layernorm": ("mlp.dense_h_to_4h",)},
    writers=("attention.dense", "mlp.dense_4h_to_h"),
    final="final_layer_norm",
    value="attention.query_key_value",
    output="attention.dense",
    values="by_head",
    downs=("mlp.dense_4h_to_h",),
)
