"""Races whole adapted decoders: a step of training, its memory, orthogonality afterwards, and the error of a merge."""

import copy
import functools
import importlib.util
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit.measuring.races.clock import peak_bytes
from stiefelkit.metrics import orthogonality_error, rounding_limit

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Layers of each block of the decoder that can be adapted."""
OURS: dict[str, dict[str, Any]] = {
    "blocks of {block}": {"block_size": "{block}"},
    "blocks of {block}, shared": {"block_size": "{block}", "shared": True},
    "butterfly, 1 factor of {block}": {"parametrization": "butterfly", "block_size": "{block}"},
    "butterfly, 2 factors of {block}": {"parametrization": "butterfly", "block_size": "{block}", "factors": 2},
    "{reflectors} reflectors": {"parametrization": "householder", "reflections": "{reflectors}"},
    "principal, rank {rank}": {"parametrization": "principal", "rank": "{rank}"},
    "low rank {rank}, Cayley maps": {"parametrization": "low_rank", "rank": "{rank}", "inner": "cayley"},
    "low rank {rank}, CayleyAdam": {"parametrization": "low_rank", "rank": "{rank}"},
}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "PEFT OFT, blocks of {block}, exact": ("OFTConfig", {"oft_block_size": "{block}", "use_cayley_neumann": False}),
    "PEFT OFTv2, blocks of {block}": ("OFTConfig", {"oft_block_size": "{block}"}),
    "PEFT OFTv2, shared": ("OFTConfig", {"oft_block_size": "{block}", "block_share": True}),
    "PEFT BOFT, 1 factor of {block}": ("BOFTConfig", {"boft_block_size": "{block}"}),  # without CUDA never more
    "PEFT HRA, {reflectors} reflectors": ("HRAConfig", {"r": "{reflectors}"}),
    "PEFT PSOFT, rank {rank}": ("PsoftConfig", {"r": "{rank}", "psoft_alpha": "{rank}"}),
    "PEFT LoRA, rank {rank}": ("LoraConfig", {"r": "{rank}"}),
}
"""Configurations by what is raced; "{block}" and its like are the sizes of the race."""
LOOKED_AT = slice(None, None, 6)
"""Of the adapted layers, those whose orthogonality is measured."""


class Contender(NamedTuple):
    """An adapted model, its optimizer, and its times so far; the plain model has no optimizer."""

    model: Any
    optimizer: torch.optim.Optimizer | None
    seconds: list[float]


def decoder(layers: int, width: int, vocabulary: int) -> Any:
    """A frozen decoder like Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config).requires_grad_(False)


def twin(model: nn.Module) -> Any:
    """A copy that shares the parameters."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def contenders(
    base: nn.Module, projections: list[str], sizes: dict[str, int], lr: float
) -> Iterator[tuple[str, Contender]]:
    """Adapted copies of a decoder; PEFT's too, where it is installed."""

    def filled(options: dict[str, Any]) -> dict[str, Any]:
        return {key: sizes[v[1:-1]] if isinstance(v, str) and v[0] == "{" else v for key, v in options.items()}

    yield "the frozen decoder", Contender(base, None, [])
    for name, options in OURS.items():
        model = sk.nn.adapt(twin(base), [f"*.{p}" for p in projections], **filled(options))
        groups = sk.optim.parameter_groups(model, lr=lr)
        of_frames = name.endswith("CayleyAdam")
        optimizer = sk.optim.CayleyAdam(groups) if of_frames else torch.optim.Adam(trained(model), lr)
        yield name.format(**sizes), Contender(model, optimizer, [])
    if importlib.util.find_spec("peft") is None:
        return
    import peft  # pyright: ignore[reportMissingImports]

    for name, (kind, options) in THEIRS.items():
        config = getattr(peft, kind)(target_modules=projections, **filled(options))
        model = peft.get_peft_model(twin(base), config)
        yield name.format(**sizes), Contender(model, torch.optim.Adam(trained(model), lr), [])


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def step(contender: Contender, x: Tensor, tokens: Tensor) -> None:
    """Forward, backward to the embeddings, and the optimizer's step."""
    contender.model(inputs_embeds=x, labels=tokens).loss.backward()
    x.grad = None
    if contender.optimizer is not None:
        contender.optimizer.step()
        contender.optimizer.zero_grad()


@torch.no_grad()
def frames(module: nn.Module) -> Iterator[Tensor]:
    """The matrices with orthonormal columns that an adapter has, whoever made it; blocks in one batch."""
    if isinstance(module, sk.nn.LowRankAdapter):
        yield from (module.left.weight, module.right.weight)
    elif isinstance(module, sk.nn.ButterflyAdapter):
        yield module.rotation.matrix
    elif isinstance(module, sk.nn.PrincipalAdapter | sk.nn.OrthogonalAdapter):
        w = module.rotation.weight
        yield diagonal_blocks(w, getattr(module.rotation, "blocks", 1) // getattr(module.rotation, "copies", 1))
    elif hasattr(module, "oft_R"):
        rotation: Any = module.oft_R["default"]  # type: ignore[index]
        yield diagonal_blocks(rotation.get_weight(), rotation.in_features // rotation.block_size)
    elif hasattr(module, "boft_R"):
        yield module.get_delta_weight("default")[0]  # type: ignore[operator]
    elif hasattr(module, "hra_u"):
        yield module.get_delta_weight("default")  # type: ignore[operator]
    elif hasattr(module, "psoft_R"):
        layer: Any = copy.deepcopy(module.psoft_R["default"])  # type: ignore[index]
        layer.vector_a = layer.vector_b = None
        yield layer.get_matrix()


def diagonal_blocks(w: Tensor, blocks: int) -> Tensor:
    rows = len(w) // blocks
    return w.view(blocks, rows, blocks, rows).diagonal(dim1=0, dim2=2).movedim(-1, 0)


def limits(model: nn.Module) -> float | None:
    """The largest ||R^T R - I||_F in rounding limits, of a block where R has blocks."""
    adapted = [m for m in model.modules() if next(frames(m), None) is not None][LOOKED_AT]
    errors = [
        orthogonality_error(w).max().item() / rounding_limit(w.shape[-2], w.dtype) for m in adapted for w in frames(m)
    ]
    return max(errors, default=None)


@torch.no_grad()
def merge_error(model: Any, x: Tensor) -> float:
    """The relative error of the logits of the merged model."""
    model.eval()
    before = model(inputs_embeds=x).logits
    if hasattr(model, "merge_and_unload"):  # writes into weights, which are shared
        after = copy.deepcopy(model).merge_and_unload()(inputs_embeds=x).logits
    else:
        after = sk.nn.fold(model)(inputs_embeds=x).logits
    return (torch.dist(after, before) / torch.linalg.vector_norm(before)).item()


def race_decoders(base: Any, projections: list[str], shape: list[int], rounds: int, sizes: dict[str, int]) -> None:
    """Prints a row for each contender."""
    tokens = torch.randint(base.config.vocab_size, shape)
    x = base.get_input_embeddings()(tokens).detach().requires_grad_()
    entries = dict(contenders(base, projections, sizes, lr=1e-2))
    sequences = " x ".join(map(str, shape))
    print(f"{sum(p.numel() for p in base.parameters()) / 1e6:.0f} M parameters, {sequences} tokens, {rounds} rounds")
    for i in range(rounds + 1):
        for entry in entries.values():
            start = time.process_time()
            step(entry, x, tokens)
            entry.seconds.extend([time.process_time() - start][:i])  # the first is a warm-up
    plain = entries["the frozen decoder"]
    alone = peak(plain, x, tokens)
    for name, entry in entries.items():
        ratio = statistics.median(a / b for a, b in zip(entry.seconds, plain.seconds, strict=True))
        if entry is plain:
            print(f"{name:38} {statistics.median(plain.seconds):.2f} s {alone / 2**20:7.0f} MiB", flush=True)
            continue
        numbers, memory = sum(p.numel() for p in trained(entry.model)), peak(entry, x, tokens) - alone
        error = limits(entry.model)
        print(
            f"{name:38} {numbers:9} numbers  time {ratio:5.2f}  memory {memory / 2**20:+7.0f} MiB  "
            f"limits {'-' if error is None else format(error, '.3g'):>8}  merge {merge_error(entry.model, x):.1e}",
            flush=True,
        )


def peak(entry: Contender, x: Tensor, tokens: Tensor) -> int:
    return peak_bytes(functools.partial(step, entry, x, tokens), torch.device("cpu"))
