"""Decoders whose residual stream can be rotated: the places of their layers, by families."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stiefelkit.errors import OptionError, ShapeError, needs
from stiefelkit.nn.frozen import attribute

__all__ = ["Decoder", "Heads", "RotationSites", "decoders", "rotation_sites"]


@dataclass(frozen=True)
class Decoder:
    """The places of the layers of a family of decoders, as names inside its base model, and inside of a block.

    Those that are left out are Llama's.
    """

    classes: tuple[str, ...]  #: names of the classes of base models, "LlamaModel"
    embeddings: tuple[str, ...] = ("embed_tokens",)  #: what writes the residual stream first
    blocks: str = "layers"  #: the list of blocks
    norms: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
        }
    )  #: norm to what reads it, in a block
    writers: tuple[str, ...] = ("self_attn.o_proj", "mlp.down_proj")
    """Layers of a block whose outputs are added to the stream."""
    final: str = "norm"  #: the norm in front of the head, which is the model's output embedding
    value: str = "self_attn.v_proj"  #: the layer of a block that makes the values of attention
    output: str = "self_attn.o_proj"  #: the layer that reads attended values
    values: Literal["all", "last", "by_head"] = "all"
    """Rows of `value` that are values: all, the last (after queries and keys), or those at the end of each head of keys
    (after its queries and keys)."""
    downs: tuple[str, ...] = ()  #: layers of a block that read the inner features of an MLP, none if left out


@dataclass(frozen=True)
class Heads:
    """The value and output layers of an attention, between which each head may be rotated."""

    value: nn.Module  #: the layer that makes values
    output: nn.Module  #: the layer that reads them
    count: int  #: heads of queries
    groups: int  #: heads of keys and values, each shared by count / groups heads of queries
    rows: Tensor  #: the rows of `value` that hold values, head by head

    @property
    def size(self) -> int:
        """The number of features of a head."""
        return len(self.rows) // self.groups


@dataclass
class RotationSites:
    """The layers of a decoder on its residual stream, and its attentions; made by `rotation_sites`, or by hand.

    Where `rotate_` replaces a norm or a layer of the model, it does so here too, so that sites may be used again.
    """

    model: nn.Module
    norms: Mapping[nn.Module, Sequence[nn.Module]]  #: norm to the layers that read it
    writers: Sequence[nn.Module]  #: embeddings, and layers whose outputs are added to the stream
    heads: Sequence[Heads] = ()  #: the attentions, in the order of blocks
    downs: Sequence[nn.Module] = ()  #: the layers that read the inner features of an MLP

    @property
    def size(self) -> int:
        """The number of features of the stream."""
        w: Any = self.writers[0].weight
        return int(w.shape[1] if isinstance(self.writers[0], nn.Embedding) else w.shape[0])

    def replace(self, others: Mapping[int, nn.Module]) -> None:
        """Puts others, by the id of what they replace in the model, into these sites."""

        def new(layer: nn.Module) -> nn.Module:
            return others.get(id(layer), layer)

        self.norms = {new(norm): [*map(new, read)] for norm, read in self.norms.items()}
        self.writers, self.downs = [*map(new, self.writers)], [*map(new, self.downs)]
        self.heads = [replace(one, value=new(one.value), output=new(one.output)) for one in self.heads]


def check_sites(sites: RotationSites, who: str) -> None:
    """Raises OptionError for the sites of a model in which a layer was replaced since."""
    if not isinstance(sites, RotationSites):
        raise OptionError(f"{who} needs sites, which rotation_sites(model) returns, got {type(sites).__name__}.")
    held = {*sites.model.modules()}
    for layer in (*sites.norms, *sites.writers, *(layer for read in sites.norms.values() for layer in read)):
        got = f"{type(layer).__name__}, which is not, or no longer; rotation_sites(model) finds them"
        needs(layer in held, OptionError, who, "sites whose layers are in the model", got)


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
"""GPT-2: layer norms, positions that are learned, `Conv1D` in the place of linear layers."""
GPT_NEOX = Decoder(
    classes=("GPTNeoXModel",),
    embeddings=("embed_in",),
    norms={"input_layernorm": ("attention.query_key_value",), "post_attention_layernorm": ("mlp.dense_h_to_4h",)},
    writers=("attention.dense", "mlp.dense_4h_to_h"),
    final="final_layer_norm",
    value="attention.query_key_value",
    output="attention.dense",
    values="by_head",
    downs=("mlp.dense_4h_to_h",),
)
"""GPT-NeoX and Pythia: layer norms, queries, keys and values of each head together, attention beside the MLP."""
LLAMA = Decoder(
    classes=("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "GemmaModel"), downs=("mlp.down_proj",)
)
"""Llama and its like: separate projections, root mean squares, gated MLPs."""
PHI3 = replace(
    LLAMA,
    classes=("Phi3Model",),
    norms={"input_layernorm": ("self_attn.qkv_proj",), "post_attention_layernorm": ("mlp.gate_up_proj",)},
    value="self_attn.qkv_proj",
    values="last",
)
"""Phi-3: one layer for queries, keys and values, one for gate and up."""
decoders = {"gpt2": GPT2, "gpt_neox": GPT_NEOX, "llama": LLAMA, "phi3": PHI3}
"""Families of decoders by name; another `Decoder` that is put here is known in this process."""
_NORMED_OUTPUTS = {"Gemma2Model", "Gemma3Model", "Gemma3TextModel"}


def rotation_sites(model: nn.Module) -> RotationSites:
    """Finds the layers of a decoder that a rotation of its residual stream, or of its heads, is folded into.

    Known are models of transformers with a head: Llama, Mistral, Qwen2, Qwen3, Gemma, Phi-3, GPT-2, GPT-NeoX, and what
    is put into `decoders`. Others are described by a `RotationSites` of one's own. Models that norm what a
    block adds to the stream (Gemma 2 and 3) have no such rotation.

    Args:
        model: the model, with its head.
    """
    found = sorted(_NORMED_OUTPUTS & {type(module).__name__ for module in model.modules()})
    got = f"{', '.join(found)}, which norms it first: no rotation passes the scale of that norm"
    needs(not found, OptionError, "rotation_sites", "a model that adds to its stream what blocks write", got)
    known = {name: decoder for decoder in decoders.values() for name in decoder.classes}
    bases = [(module, known[type(module).__name__]) for module in model.modules() if type(module).__name__ in known]
    got = f"{type(model).__name__}{' with several' if bases else ''}; describe it by a RotationSites"
    wanted = f"a model with one base of a known class ({', '.join(sorted(known))})"
    needs(len(bases) == 1, OptionError, "rotation_sites", wanted, got)
    (base, decoder), find = bases[0], attribute(model, "get_output_embeddings")
    head = find() if callable(find) else None
    if not isinstance(head, nn.Module):
        raise OptionError(f"rotation_sites needs a model with its head, got {type(model).__name__} without.")
    blocks = list(base.get_submodule(decoder.blocks).children())
    table = decoder.norms.items()
    norms = {b.get_submodule(norm): [*map(b.get_submodule, read)] for b in blocks for norm, read in table}
    norms[base.get_submodule(decoder.final)] = [head]
    embeddings = [base.get_submodule(name) for name in decoder.embeddings]
    writers = [*embeddings, *(block.get_submodule(name) for block in blocks for name in decoder.writers)]
    downs = [block.get_submodule(name) for block in blocks for name in decoder.downs]
    return RotationSites(model, norms, writers, list(_heads(base, decoder, blocks)), downs)


def _heads(base: nn.Module, decoder: Decoder, blocks: Sequence[nn.Module]) -> Iterator[Heads]:
    config: Any = base.config
    count = config.num_attention_heads
    groups = attribute(config, "num_key_value_heads", "num_kv_heads", default=count)
    size = attribute(config, "head_dim") or config.hidden_size // count
    before = 0 if decoder.values == "all" else count + groups
    rows = torch.arange((before + groups) * size, device="cpu")
    rows = rows.view(groups, -1, size)[:, -1].flatten() if decoder.values == "by_head" else rows[before * size :]
    for block in blocks:
        value = block.get_submodule(decoder.value)
        got = attribute(value, "out_features", "nf")
        wanted = f"{(before + groups) * size} rows in {decoder.value}, by {count} and {groups} heads of {size}"
        is_known = got in (None, (before + groups) * size)
        needs(is_known, ShapeError, "rotation_sites", wanted, f"{got}; describe it by a RotationSites")
        yield Heads(value, block.get_submodule(decoder.output), count, groups, rows)
