"""GPT-2: layer norms, positions that are learned, `Conv1D` in the place of linear layers."""

from stiefelkit.nn.decoders import Decoder

GPT2 = Decoder(
    classes=("GPT2Model",),
    embeddings=("wte", "wpe"),
    blocks="h",
    norms={"ln_1": ("attn.c_attn",), "ln_2": ("mlp.c_fc",)},
    writers=("attn.c_proj", "mlp.c_proj"),
    final="ln_f",
    value="attn.c_attn",
    output="attn.c_proj",
    values="last",
    downs=("mlp.c_proj",),
)
