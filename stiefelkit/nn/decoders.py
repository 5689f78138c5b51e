"""Decoders whose residual stream can be rotated: the places of their layers, by families."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stiefelkit._torch import held_parameters
from stiefelkit.errors import OptionError, ShapeError, needs
from stiefelkit.nn.folding import Matrix
from stiefelkit.nn.frozen import attribute
from stiefelkit.nn.stream import writers_beside

__all__ = ["Decoder", "Heads", "RotationSites", "decoders", "rotation_sites"]


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True)
class Decoder:
    """The places of the layers of a family of decoders, as names inside its base model, and inside of a block.

    Those that are left out are Llama's. "a|b" is the first of both that a block has, "a|" may be missing. A name may be
    that of a parameter, a matrix or a stack of them, one for each expert.
    """

    classes: Mapping[str, Mapping[str, Any]]
    """Names of the classes of base models, "LlamaModel", each with what the configuration of a tiny one needs beside
    the sizes that all have."""
    embeddings: tuple[str, ...] = ("embed_tokens",)  #: what writes the residual stream first
    blocks: str = "layers"  #: the list of blocks
    norms: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            "input_layernorm": _QKV,
            "post_attention_layernorm|input_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
        }
    )  #: norm to what reads it, in a block
    writers: tuple[str, ...] = ("self_attn.o_proj", "mlp.down_proj")
    """Layers of a block whose outputs are added to the stream."""
    final: str = "norm"  #: the norm in front of the head
    value: str = "self_attn.v_proj"  #: the layer of a block that makes the values of attention
    output: str = "self_attn.o_proj"  #: the layer that reads attended values
    values: Literal["all", "last", "by_head"] = "all"
    """Rows of `value` that are values: all, the last (after queries and keys), or those at the end of each head of keys
    (after its queries and keys)."""
    parts: int = 1  #: heads of values side by side in what is attended, as in differential attention
    downs: tuple[str, ...] = ()  #: layers of a block that read the inner features of an MLP, none if left out


@dataclass(frozen=True)
class Heads:
    """The value and output layers of an attention, between which each head may be rotated."""

    value: nn.Module  #: the layer that makes values
    output: nn.Module  #: the layer that reads them
    count: int  #: heads of queries
    groups: int  #: heads of keys and values, each shared by count / groups heads of queries
    rows: Tensor  #: the rows of `value` that hold values, head by head
    parts: int = 1  #: heads of values side by side in each that `output` reads

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
    inputs: Mapping[str, Any] | None = None
    """Keyword arguments of the model that outputs are compared on, images too; by default some are made."""
    readers: Sequence[nn.Module] = ()  #: layers that read the stream with no norm in front
    beside: Sequence[nn.Module] = ()  #: writers outside of the base, as what projects images

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
        self.writers, self.readers, self.downs = ([*map(new, g)] for g in (self.writers, self.readers, self.downs))
        self.heads = [replace(one, value=new(one.value), output=new(one.output)) for one in self.heads]


def check_sites(sites: RotationSites, who: str) -> None:
    """Raises OptionError for the sites of a model in which a layer was replaced since."""
    if not isinstance(sites, RotationSites):
        raise OptionError(f"{who} needs sites, which rotation_sites(model) returns, got {type(sites).__name__}.")
    needs(len(sites.writers) > 0, OptionError, who, "sites with writers", "none")
    held = {*sites.model.modules()}
    for layer in (*sites.norms, *sites.writers, *sites.readers, *itertools.chain(*sites.norms.values())):
        got = f"{type(layer).__name__}, which is not, or no longer; rotation_sites(model) finds them"
        is_held = layer in held
        if isinstance(layer, Matrix):
            is_held = layer.owner in held and held_parameters(layer.owner).get(layer.name) is layer.weight
        needs(is_held, OptionError, who, "sites whose layers are in the model", got)


_SIZES: Mapping[str, Any] = {}  # those that all have
_FEW: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _read_by(attention: tuple[str, ...], *mlp: str) -> Mapping[str, tuple[str, ...]]:
    """Returns Llama's norms with other readers; a block without the second norm has both behind the first."""
    return {"input_layernorm": attention, "post_attention_layernorm|input_layernorm": mlp}


LLAMA = Decoder(
    classes={
        **dict.fromkeys("LlamaModel MistralModel Qwen2Model Qwen3Model GemmaModel HeliumModel".split(), _SIZES),
        **dict.fromkeys("SeedOssModel Ernie4_5Model HunYuanDenseV1Model SmolLM3Model".split(), _SIZES),
        **dict.fromkeys("OlmoModel CohereModel Cohere2Model".split(), _SIZES),
        "GraniteModel": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
        "StableLmModel": {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
    },
    downs=("mlp.down_proj",),
)
"""Llama and its like: separate projections, gated MLPs, with norms of any kind, one or two in a block."""
GPT2 = Decoder(
    classes={"GPT2Model": {"n_inner": 48}},
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
decoders = {
    "llama": LLAMA,
    "diffllama": replace(LLAMA, classes={"DiffLlamaModel": {}}, parts=2),
    "phi3": replace(
        LLAMA,
        classes={"Phi3Model": {}},
        norms=_read_by(("self_attn.qkv_proj",), "mlp.gate_up_proj"),
        value="self_attn.qkv_proj",
        values="last",
    ),
    "ungated": replace(LLAMA, classes={"NemotronModel": {}, "ArceeModel": {}}, norms=_read_by(_QKV, "mlp.up_proj")),
    "starcoder2": Decoder(
        classes={"Starcoder2Model": {}},
        norms=_read_by(_QKV, "mlp.c_fc"),
        writers=("self_attn.o_proj", "mlp.c_proj"),
        downs=("mlp.c_proj",),
    ),
    "phi": Decoder(
        classes={"PhiModel": {}},
        norms=_read_by(_QKV, "mlp.fc1"),
        writers=("self_attn.dense", "mlp.fc2"),
        final="final_layernorm",
        output="self_attn.dense",
        downs=("mlp.fc2",),
    ),
    "mixture": Decoder(
        classes={
            "MixtralModel": {"num_local_experts": 4},
            "Qwen2MoeModel": {**_FEW, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
            "Qwen3MoeModel": _FEW,
            "OlmoeModel": _FEW,
            "GptOssModel": {"num_local_experts": 4, "num_experts_per_tok": 2},
        },
        norms=_read_by(
            _QKV,
            *("mlp.experts.gate_up_proj|mlp.gate_proj", "mlp.up_proj|", "mlp.gate.weight|mlp.router.weight|"),
            *("mlp.shared_expert.gate_proj|", "mlp.shared_expert.up_proj|", "mlp.shared_expert_gate|"),
        ),
        writers=("self_attn.o_proj", "mlp.experts.down_proj|mlp.down_proj", "mlp.shared_expert.down_proj|"),
        downs=("mlp.down_proj|mlp.shared_expert.down_proj|",),
    ),
    "gpt2": GPT2,
    "gpt_bigcode": replace(GPT2, classes={"GPTBigCodeModel": {"n_inner": 48}}, values="by_head"),
    "gpt_neo": replace(
        GPT2,
        classes={"GPTNeoModel": {"attention_types": [[["global", "local"], 1]], "intermediate_size": 48}},
        norms={"ln_1": tuple(f"attn.attention.{name}_proj" for name in "qkv"), "ln_2": ("mlp.c_fc",)},
        writers=("attn.attention.out_proj", "mlp.c_proj"),
        value="attn.attention.v_proj",
        output="attn.attention.out_proj",
        values="all",
    ),
    "gptj": replace(
        GPT2,
        classes={"GPTJModel": {"n_inner": 48, "rotary_dim": 4}},
        embeddings=("wte",),
        norms={"ln_1": ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.fc_in")},
        writers=("attn.out_proj", "mlp.fc_out"),
        value="attn.v_proj",
        output="attn.out_proj",
        values="all",
        downs=("mlp.fc_out",),
    ),
    "gpt_neox": Decoder(
        classes={"GPTNeoXModel": {}},
        embeddings=("embed_in",),
        norms=_read_by(("attention.query_key_value",), "mlp.dense_h_to_4h"),
        writers=("attention.dense", "mlp.dense_4h_to_h"),
        final="final_layer_norm",
        value="attention.query_key_value",
        output="attention.dense",
        values="by_head",
        downs=("mlp.dense_4h_to_h",),
    ),
    "falcon": Decoder(
        classes={"FalconModel": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}},
        embeddings=("word_embeddings",),
        blocks="h",
        norms={
            "ln_attn|input_layernorm": ("self_attention.query_key_value",),
            "ln_mlp|post_attention_layernorm|input_layernorm": ("mlp.dense_h_to_4h",),
        },
        writers=("self_attention.dense", "mlp.dense_4h_to_h"),
        final="ln_f",
        value="self_attention.query_key_value",
        output="self_attention.dense",
        values="by_head",
        downs=("mlp.dense_4h_to_h",),
    ),
}
"""Families of decoders by name; another `Decoder` that is put here is known in this process."""
_HEADS = ("score", "classifier", "qa_outputs")
"""Heads that are no output embeddings: of classifiers of sequences and of tokens, and of answers to questions."""
_NORMED = "Afmoe Bloom Exaone4 FlexOlmo Gemma2 Gemma3 Gemma3Text Gemma4Text Glm4 Olmo2 Olmo3"
_NORMED_OUTPUTS = {f"{name}Model" for name in _NORMED.split()}


def rotation_sites(model: nn.Module, *, inputs: Mapping[str, Any] | None = None) -> RotationSites:
    """Finds the layers of a decoder that a rotation of its residual stream, or of its heads, is folded into.

    Known are the classes of bases that `decoders` names, with a head: that of a language model, or a classifier. Others
    are described by a `RotationSites` of one's own. Models that norm what is added to the stream (Gemma 2 and 3,
    OLMo 2, EXAONE 4, GLM-4, BLOOM) have no such rotation: R does not commute with the scale of that norm.

    Args:
        model: the model, with its head. What lies around its base and writes into the place of embeddings, as what
            projects images and a soft prompt of PEFT, is found by a run of a copy on images and tokens.
        inputs: keyword arguments of the model for that run, where its images cannot be made from its configuration.
    """
    normed = sorted(_NORMED_OUTPUTS & {type(module).__name__ for module in model.modules()})
    got = f"{', '.join(normed)}, which norms it first: no rotation passes the scale of that norm"
    needs(not normed, OptionError, "rotation_sites", "a model whose stream is what embeddings and blocks write", got)
    known = {name: decoder for decoder in decoders.values() for name in decoder.classes}
    bases = [(module, known[type(module).__name__]) for module in model.modules() if type(module).__name__ in known]
    got = f"{type(model).__name__}{' with several' if bases else ''}; describe it by a RotationSites"
    wanted = f"a model with one base of a known class ({', '.join(sorted(known))})"
    needs(len(bases) == 1, OptionError, "rotation_sites", wanted, got)
    base, decoder = bases[0]
    find = attribute(model, "get_output_embeddings")
    head = (find() if callable(find) else None) or attribute(model, *_HEADS)
    if not isinstance(head, nn.Module):
        got = f"{type(model).__name__} without; a bare base gives its stream, which a rotation changes"
        raise OptionError(f"rotation_sites needs a model with its head (or {', '.join(_HEADS)}), got {got}.")
    blocks = list(base.get_submodule(decoder.blocks).children())
    norms: dict[nn.Module, list[nn.Module]] = {}
    for block in blocks:
        for norm, read in decoder.norms.items():
            (found,) = _named(block, (norm,))
            norms.setdefault(found, []).extend(_named(block, read))
    norms[base.get_submodule(decoder.final)] = [head]
    embeddings = _named(base, decoder.embeddings)
    writers = [*embeddings, *(layer for block in blocks for layer in _named(block, decoder.writers))]
    downs = [layer for block in blocks for layer in _named(block, decoder.downs)]
    sites = RotationSites(model, norms, writers, list(_heads(base, decoder, blocks)), downs, inputs)
    sites.beside = writers_beside(model, base, writers, sites.size, inputs)
    sites.writers = [*writers, *sites.beside]
    return sites


def _named(module: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """Returns what names say in a module, without those that may be missing: see `Decoder`."""
    modules, matrices = dict(module.named_modules()), dict(module.named_parameters())
    keys = [next((one for one in name.split("|") if one in modules or one in matrices), None) for name in names]
    missing = [name for name, key in zip(names, keys, strict=True) if key is None and not name.endswith("|")]
    got = f"{type(module).__name__} without {', '.join(missing)}; describe it by a RotationSites"
    needs(not missing, OptionError, "rotation_sites", "the layers of the family", got)
    found = [(key, key.rpartition(".")) for key in keys if key]
    return [modules[k] if k in modules else Matrix(modules[owner], name) for k, (owner, _, name) in found]


def _heads(base: nn.Module, decoder: Decoder, blocks: Sequence[nn.Module]) -> Iterator[Heads]:
    config: Any = base.config
    if attribute(config, "clip_qkv") is not None:  # by entries
        return
    count = config.num_attention_heads
    groups = attribute(config, "num_key_value_heads", "num_kv_heads", default=count)
    groups = 1 if attribute(config, "multi_query") and not attribute(config, "new_decoder_architecture") else groups
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
        yield Heads(value, block.get_submodule(decoder.output), count, groups, rows, decoder.parts)
