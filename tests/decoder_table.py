"""The table of families of decoders and of what is done with them: `python tests/decoder_table.py` prints it."""

import functools
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from decoder_laws import logits, tiny_decoder

from stiefelkit import init
from stiefelkit.errors import StiefelkitError
from stiefelkit.nn.decoders import decoders, rotation_sites
from stiefelkit.nn.folding import layer_norm_eps
from stiefelkit.nn.rotation import mean_preserving, rotate_
from stiefelkit.nn.transforms import save_transforms
from stiefelkit.testing import seeds

KINDS = {name.removesuffix("Model"): sizes for one in decoders.values() for name, sizes in one.classes.items()}
REFUSED = ["Gemma2", "Gemma3Text", "Olmo2", "Olmo3", "Exaone4", "Glm4", "Bloom"]
BOUNDS = {"float32": 1e-5, "bfloat16": 0.1, "saved": 1e-5, "quanto": 0.1}  # 1e-6 for others


def made(kind: str, dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[Any, torch.Tensor]:
    seeds.reseed()
    model = tiny_decoder(f"{kind}Model", **{**KINDS.get(kind, {}), **changes}).to(dtype)
    return model, logits(model)


def turned(model: Any, online: bool = True, is_for_files: bool = False) -> Any:
    """Returns a model with a rotation of its stream, one of each head, and online ones where there are places.

    For files the rotation of a stream with layer norms is one that they stay layer norms by.
    """
    sites = rotation_sites(model)
    r = init.haar((sites.size, sites.size))
    if is_for_files and any(layer_norm_eps(norm) is not None for norm in sites.norms):
        r = mean_preserving(r)
    heads = [init.haar((one.groups, one.size, one.size)) for one in sites.heads]
    rotate_(r, sites=sites, heads=heads, online=online and bool(sites.downs))
    return model


def off(value: torch.Tensor, exact: torch.Tensor) -> float:
    return (torch.dist(value.double(), exact.double()) / exact.double().norm()).item()


def in_dtype(kind: str, dtype: torch.dtype = torch.float64, **changes: Any) -> float:
    model, before = made(kind, dtype, **changes)
    return off(logits(turned(model)), before)


@functools.cache
def another_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def loaded(folder: str) -> torch.Tensor:
    import transformers

    options: Any = {"experts_implementation": "eager"}
    return logits(transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval())


def saved(kind: str) -> float:
    """Saves a rotated model, and loads it in another process."""
    model, before = made(kind, torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        turned(model, online=False, is_for_files=True).save_pretrained(folder)
        return off(another_process().submit(loaded, folder).result(), before)


def generated(kind: str) -> float:
    """Compares the scores of eight tokens that are generated with a cache."""
    tokens = torch.arange(1, 9)[None]
    options = {"max_new_tokens": 8, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}

    def scores(model: Any) -> torch.Tensor:
        return torch.stack(model.generate(tokens, attention_mask=tokens > 0, **options).scores)

    model, _ = made(kind)
    before = scores(model)
    return off(scores(turned(model)), before)


def quantized(kind: str) -> float:
    """Compares a rotated model, its linear layers in eight bits of optimum-quanto, with the model as it was."""
    from optimum import quanto  # pyright: ignore[reportMissingImports]

    model, before = made(kind, torch.float32)
    quanto.quantize(turned(model), weights=quanto.qint8)
    quanto.freeze(model)
    return off(logits(model), before)


def merged(kind: str) -> float:
    """Merges a LoRA of all linear layers into a rotated model, and compares with it as it was unmerged."""
    import peft

    model, plain = made(kind)
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    adapted: Any = peft.get_peft_model(turned(model), config)
    before = logits(adapted)
    assert off(before, plain) > 1e-3
    return off(logits(adapted.merge_and_unload()), before)


def served(kind: str) -> float:
    """Saves a rotated model with its transforms, which compressed-tensors alone then puts in."""
    import transformers
    from compressed_tensors.transform import (  # pyright: ignore[reportMissingImports]
        TransformConfig,
        apply_transform_config,
    )

    model, before = made(kind, intermediate_size=64, n_inner=64, shared_expert_intermediate_size=32)
    with tempfile.TemporaryDirectory() as folder:
        save_transforms(turned(model, is_for_files=True), f"{folder}/out")
        options: Any = {"experts_implementation": "eager", "dtype": torch.float64}
        theirs = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/out", **options).eval()
    apply_transform_config(theirs, TransformConfig(**theirs.config.transform_config))
    return off(logits(theirs), before)


COLUMNS: dict[str, Callable[[str], float]] = {
    "float64": in_dtype,
    "float32": functools.partial(in_dtype, dtype=torch.float32),
    "bfloat16": functools.partial(in_dtype, dtype=torch.bfloat16),
    "tied": functools.partial(in_dtype, tie_word_embeddings=True),
    "saved": saved,
    "generate": generated,
    "quanto": quantized,
    "PEFT": merged,
    "transforms": served,
}


def cell(kind: str, column: str) -> float | str:
    """Returns how far off logits are, relative to their norm, or the sentence that refuses it."""
    try:
        return COLUMNS[column](kind)
    except StiefelkitError as error:
        return str(error)


if __name__ == "__main__":
    print("|", " | ".join(["family", *COLUMNS]), "|\n|" + "---|" * (1 + len(COLUMNS)))
    sentences: dict[str, int] = {}
    for kind in sys.argv[1:] or [*KINDS, *REFUSED]:
        row = [cell(kind, name) for name in ([*COLUMNS] if kind in KINDS else ["float64"])]
        shown = [f"({sentences.setdefault(x, len(sentences) + 1)})" if isinstance(x, str) else f"{x:.0e}" for x in row]
        print("|", " | ".join([kind, *shown]), "|", flush=True)
    print(*(f"\n({i}) {sentence}" for sentence, i in sentences.items()))
