"""Learns the rotations under which a small language model survives 4 bits, folds them in, saves the model.

    pip install transformers
    python examples/rotate_decoder.py
    python examples/rotate_decoder.py --family gpt2 --seeds 3 --steps 800 --out rotated

A decoder of transformers (two blocks, bytes as tokens) learns the text of Python's own help, with a few channels of
its stream 30 times as large as the others at first, as in large models. Then all layers between embedding and head are
rounded, weights by rows and inputs by tokens, 4 bits each: as the model stands, under a Hadamard matrix with random
signs, under a random rotation, and under rotations of stream and heads that `SGDG` learns from the rounded model's
loss. For each it prints the perplexity of bytes that were not trained on; then the orthogonality of what was learned at
its worst, in rounding limits, and how far the logits of the folded model are from those before, both unrounded.
"""

import argparse
import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import stiefelkit as sk

OUTLIERS = [3, 20, 41]


def text() -> Tensor:
    topics: Any = pydoc_data.topics.topics
    return torch.tensor(list("\n".join(topics.values()).encode()), dtype=torch.long)


def decoder(family: str) -> Any:
    sizes: dict[str, Any] = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": True}
    if family == "gpt2":
        config: Any = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=128, **sizes)
        model: Any = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            **{**sizes, "tie_word_embeddings": False},
        )
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, OUTLIERS] *= 30
    return model


def batches(data: Tensor, steps: int, length: int = 128, rows: int = 8) -> Any:
    for _ in range(steps):
        starts = torch.randint(len(data) - length, (rows,))
        yield torch.stack([data[i : i + length] for i in starts])


def train(model: Any, data: Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for x in batches(data, steps):
        optimizer.zero_grad()
        model(x, labels=x).loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()


def learn(rotated: sk.nn.Rotated, data: Tensor, steps: int, lr: float) -> float:
    """Returns the orthogonality of the worst rotation on the way, in rounding limits."""
    optimizer = sk.optim.SGDG(sk.optim.parameter_groups(rotated, lr=lr))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    worst = 0.0
    for x in batches(data, steps):
        optimizer.zero_grad()
        rotated(x, labels=x).loss.backward()
        optimizer.step()
        schedule.step()
        worst = max(worst, *(drift.error / drift.limit for drift in sk.drift(rotated).values()))
    return worst


@torch.no_grad()
def perplexity(model: Any, data: Tensor) -> float:
    torch.manual_seed(0)
    return torch.stack([model(x, labels=x).loss for x in batches(data, 8)]).mean().exp().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=["llama", "gpt2"], default="llama")
    parser.add_argument("--steps", type=int, default=400, help="of training the model")
    parser.add_argument("--rotation-steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1.5, help="of the rotations")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", help="the folder that the folded model is saved in")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    data = text()
    known, unseen = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    for seed in range(chosen.seeds):
        torch.manual_seed(seed)
        model = decoder(chosen.family)
        train(model, known, chosen.steps)
        tokens = next(batches(unseen, 1))
        before = model(tokens).logits.detach()
        print(f"seed {seed}: {'not rounded':40} perplexity {perplexity(model, unseen):8.3f}", flush=True)
        sites = sk.nn.rotation_sites(model)
        for start in ("identity", "hadamard", "haar"):
            torch.manual_seed(seed)
            rotated = sk.nn.rotated(model, sites, start=start)
            print(f"seed {seed}: 4 bits, {start:32} perplexity {perplexity(rotated, unseen):8.3f}", flush=True)
        torch.manual_seed(seed)
        rotated = sk.nn.rotated(model, sites)
        worst = learn(rotated, known, chosen.rotation_steps, chosen.lr)
        print(f"seed {seed}: 4 bits, {'learned from hadamard':32} perplexity {perplexity(rotated, unseen):8.3f}")
        rotated.fold()
        away = (torch.dist(model(tokens).logits, before) / before.norm()).item()
        print(f"seed {seed}: orthogonality at worst {worst:.2f} limits; folded, logits are {away:.1g} away", flush=True)
    if chosen.out and chosen.family == "gpt2":  # its norms are root mean squares now, which its class does not make
        Path(chosen.out).mkdir(parents=True, exist_ok=True)
        torch.save(model, Path(chosen.out) / "model.pt")
    elif chosen.out:
        model.save_pretrained(chosen.out)


if __name__ == "__main__":
    main()
