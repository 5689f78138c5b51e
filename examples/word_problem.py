"""How far nets follow the products of a group, and three ways to make one of reflectors follow them for ever.

    python examples/word_problem.py --group A5 --model reflector --seed 0 --seconds 20 --out runs.jsonl
    python examples/word_problem.py --table runs.jsonl --figure far.svg

The first line trains a net on words that grow from 2 letters to 32, for so many seconds of CPU time, and prints the
accuracy of the last eighth of the first 256, 1,024, ... letters of longer words, as trained and, for reflectors, by

* penalty: trained for some more steps with the squared distance of W_b W_a from W_ab as part of the loss, where W_a is
  the transition of letter a, and training data tell the letter ab;
* snapped: transitions moved to an exact representation: which letter two letters make is asked of the net, and each W_b
  becomes the polar factor of the mean over a of W_ab times the inverse of W_a, until nothing changes, which ends at a
  representation if it begins near one. Heads near none are switched off, and the read-out becomes the nearest state;
* contracted: as trained, but after every 32 letters the state becomes that of the letter which the net answers.

The second prints a table of all runs in a file, and draws the mean accuracy over the length. Nets of reflectors read
letters here by a loop of products of the transitions of their layer, which are the same for the same letter.
"""

import argparse
import copy
import itertools
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit.figure import figure
from stiefelkit.training.plot import AT
from stiefelkit.training.tasks.words import Words, products

LENGTHS = ("256", "1024", "4096", "16384")
WAYS = ("trained", "penalty", "snapped", "contracted")
COLORS = {"exact": "C0", "free": "C3", "gated": "C1"}
"""Of nets of reflectors in the figure, by tau; others are grey."""
NEAR = 0.5
"""Distance from a representation, over |W|, up to which a head is moved to it."""


def transitions(layer: sk.nn.ReflectorRNN, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the products of reflections of every letter in every head, (G, heads, d, d)."""
    heads, m = layer.heads, layer.reflections
    d = layer.hidden_size // (heads * layer.columns)
    keys, logits = layer.weight_ih_l0.mT.to(dtype).tensor_split([m * heads * d], 1)
    keys = F.normalize(keys.unflatten(1, (m, heads, d)), dim=-1)
    scales = 2 * torch.ones_like(keys[..., 0])
    if layer.tau == "gated":
        scales = torch.cat([scales[:, :-1], 2 * logits.sigmoid()[:, None]], 1)
    if layer.tau == "free":
        scales = 2 * logits.sigmoid().unflatten(1, (m, heads))
    w = torch.eye(d, dtype=dtype).expand(len(keys), heads, d, d)
    for key, scale in zip(keys.unbind(1), scales.unbind(1), strict=True):
        w = w - scale[..., None, None] * key[..., :, None] * (key[..., None, :] @ w)
    return w


def defects(w: Tensor, table: Tensor) -> Tensor:
    """Returns the squared distances of W_b W_a from W_ab, (G, G, heads), over d."""
    return (w[None] @ w[:, None] - w[table]).square().sum((-1, -2)) / w.shape[-1]


class Letters(nn.Module):
    """A net of reflectors as a loop over the products of a table of its transitions."""

    def __init__(self, model: Any, every: int = 0):
        super().__init__()
        self.model, self.every = model, every

    def forward(self, x: Tensor) -> Tensor:
        """Returns answers to one-hot letters; every so many letters the state becomes that of the letter answered."""
        layer, letters, states = self.model.rnn, x.argmax(-1), []
        table = transitions(layer)
        first = layer.h0_l0.unflatten(-1, (layer.heads, -1, layer.columns))
        orbit, state = table @ first, first.expand(len(x), -1, -1, -1)
        for t in range(letters.shape[1]):
            state = table[letters[:, t]] @ state
            states.append(state)
            if self.every and (t + 1) % self.every == 0:
                state = orbit[self.model.output(state.flatten(1)).argmax(-1)]
        return self.model.output(torch.stack(states, 1).flatten(2))


@torch.no_grad()
def learned_products(model: Any, size: int) -> Tensor:
    """Returns what the net answers to every word of two letters, (G, G)."""
    words = torch.cartesian_prod(torch.arange(size), torch.arange(size))
    return Letters(model)(torch.eye(size)[words])[:, -1].argmax(-1).unflatten(0, (size, size))


@torch.no_grad()
def representation(w: Tensor, table: Tensor, rounds: int = 20) -> Tensor:
    """Returns the exact representation near some transitions."""
    for _ in range(rounds):
        w = sk.functional.msign((w[table] @ w.mT[:, None]).mean(0))
    return w


def reflections_of(w: Tensor, count: int) -> Tensor:
    """Returns keys (count, d) of reflections with the product W, the first to meet a state first; zeros are none."""
    keys = w.new_zeros(count, len(w))
    for i in reversed(range(count)):
        moved = w - torch.eye(len(w), dtype=w.dtype)
        key = moved[:, moved.norm(dim=0).argmax()]
        if key.norm() > 1e-9:
            keys[i] = key / key.norm()
            w = w - 2 * torch.outer(keys[i], keys[i] @ w)
    return keys


@torch.no_grad()
def snap_(model: Any, table: Tensor) -> int:
    """Moves transitions to a representation and the read-out to its states; returns how many heads are near one."""
    layer, output, w = model.rnn, model.output, transitions(model.rnn, torch.float64)
    exact = representation(w, table)
    left, moved = (
        defects(exact, table).amax((0, 1)).sqrt(),
        (exact - w).square().sum((-1, -2)).mean(0) / w.shape[-1],
    )
    is_near = (left < 1e-9) & (moved.sqrt() < NEAR)
    if not is_near.any():
        return 0
    exact = torch.where(is_near[:, None, None], exact, torch.eye(w.shape[-1], dtype=w.dtype))
    keys = torch.stack([torch.stack([reflections_of(head, layer.reflections) for head in one]) for one in exact])
    layer.weight_ih_l0[: keys[0].numel()] = keys.transpose(1, 2).flatten(1).mT.to(layer.weight_ih_l0.dtype)
    layer.weight_ih_l0[keys[0].numel() :] = 40.0  # sigmoid(40) is 1
    states = layer(torch.eye(len(w))[:, None])[1][0]
    output.weight.copy_(states / states.norm(dim=-1, keepdim=True))
    output.bias.zero_()
    return int(is_near.sum())


def penalize_(model: Any, task: Words, steps: int, lr: float, seed: int) -> None:
    """Trains on with the distance from a representation as part of the loss."""
    table = products(task.group)
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for step in range(steps):
        x, y = task.batch(10**6 + step, 32, seed)
        opt.zero_grad()
        (task.loss(Letters(model)(x), y) + defects(transitions(model.rnn), table).mean()).backward()
        opt.step()
        schedule.step()


def create(options: argparse.Namespace, size: int) -> nn.Module:
    """Returns the net to train."""
    if options.model != "reflector":
        given = {
            "rotrnn": {"parametrization": "none", "heads": options.hidden // 2},
            "scornn": {"negative": options.hidden // 10},
        }
        return sk.models.create(options.model, size, options.hidden, size, **given.get(options.model, {}))
    d, heads = options.dimension, options.heads
    kinds = {
        "heads": heads,
        "columns": d,
        "reflections": options.reflections,
        "tau": options.tau,
        "additive": False,
    }
    return sk.models.create("reflector", size, heads * d * d, size, **kinds)


def train_(model: Any, net: nn.Module, task: Words, options: argparse.Namespace) -> int:
    """Trains for some seconds of CPU time, while rates fall along half a cosine and words grow; returns the steps."""
    groups = sk.optim.parameter_groups(model, lr=options.lr)
    opt = torch.optim.Adam(groups, betas=(0.9, 0.99))
    rates, begun, step = (
        [group["lr"] for group in opt.param_groups],
        time.process_time(),
        0,
    )
    while (share := (time.process_time() - begun) / options.seconds) < 1:
        for group, rate in zip(opt.param_groups, rates, strict=True):
            group["lr"] = rate * (1 + math.cos(math.pi * share)) / 2
        x, y = task.batch(step, options.batch, options.seed)
        length = round(2 * (task.T / 2) ** min(1.0, share / 0.8))
        opt.zero_grad()
        task.loss(net(x[:, :length]), y[:, :length]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        step += 1
        if step % 200 == 0:
            print(f"{step} steps, {length} letters", file=sys.stderr, flush=True)
    return step


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Trains a net, and returns its accuracies by position."""
    torch.manual_seed(options.seed)
    task = Words(options.group, rise=0, test_T=options.T, test_size=options.sequences)
    model, is_ours = create(options, task.input_size), options.model == "reflector"
    found: dict[str, Any] = {
        "group": options.group,
        "model": options.model,
        "seed": options.seed,
    }
    found |= {key: vars(options)[key] for key in ("tau", "dimension", "heads", "reflections")} if is_ours else {}
    found["parameters"] = sk.models.count_parameters(model)
    begun = time.process_time()
    found["steps"] = train_(model, Letters(model) if is_ours else model, task, options)
    found["cpu_seconds"] = round(time.process_time() - begun, 1)
    trained = copy.deepcopy(model.state_dict())
    for name in options.ways.split(",") if is_ours else ("trained",):
        model.load_state_dict(trained)
        if name == "penalty":
            penalize_(model, task, options.steps, 1e-3, options.seed)
        elif name == "snapped":
            found["heads_near"] = snap_(model, learned_products(model, task.input_size))
        net = Letters(model, 32 if name == "contracted" else 0) if is_ours else model
        if is_ours and name != "contracted":  # the loop above is the layer
            x = task.batch(0, 4, 0)[0]
            torch.testing.assert_close(net(x), model(x), rtol=1e-3, atol=1e-3)
        scores = task.evaluate(net)
        found[name] = {key[len(AT) :]: round(score, 5) for key, score in scores.items() if key.startswith(AT)}
        print(
            f"{name:11}",
            *(f"{p}: {100 * found[name][p]:.2f} %  " for p in LENGTHS if p in found[name]),
            flush=True,
        )
    return found


def told(runs: list[dict[str, Any]], figure_file: Path | None) -> None:
    """Prints mean (worst) accuracy of the seeds of each kind of net, in percent, and draws the means."""
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for run in runs:
        for how in WAYS:
            if how in run:
                name = f"reflector {run['tau']}, d = {run['dimension']}" if "tau" in run else run["model"]
                kinds.setdefault((run["group"], name, how), []).append(run)
    print("| group | net | parameters | CPU s | seeds | " + " | ".join(f"{int(p):,}" for p in LENGTHS) + " |")
    print("|" + "---|" * (5 + len(LENGTHS)))
    for (group, name, how), found in sorted(kinds.items(), key=lambda kind: (*kind[0][:2], WAYS.index(kind[0][2]))):
        cells = []
        for p in LENGTHS:
            scores = [100 * run[how][p] for run in found]
            worst = f" ({min(scores):.1f})" if min(scores) < max(scores) else ""
            cells.append(f"{statistics.fmean(scores):.1f}{worst}")
        seconds = statistics.fmean(run["cpu_seconds"] for run in found)
        label = name if how == "trained" else f"{name}, {how}"
        print(
            f"| {group} | {label} | {found[0]['parameters']:,} | {seconds:.0f} | {len(found)} | {' | '.join(cells)} |"
        )
    if figure_file is None:
        return
    groups = sorted({group for group, _, _ in kinds})
    with figure(figure_file, len(groups)) as panels:
        for axes, group in zip(panels, groups, strict=True):
            greys = itertools.cycle(["-", "--", "-.", ":"])
            for (of, name, how), found in sorted(kinds.items(), key=lambda item: (item[0][2] != "snapped", item[0])):
                if of == group and how in ("trained", "snapped"):
                    ends = list(found[0][how])
                    means = [100 * statistics.fmean(run[how][end] for run in found) for end in ends]
                    color = next((color for tau, color in COLORS.items() if f" {tau}," in name), None)
                    look: dict[str, Any] = {"color": color or "0.6"}
                    if color is None:
                        look["linestyle"] = next(greys)
                    if how == "snapped":
                        look |= {"linewidth": 5, "alpha": 0.35}
                    label = name if how == "trained" else f"{name}, {how}"
                    axes.plot([int(end) for end in ends], means, label=label.removeprefix("reflector "), **look)
            axes.set(title=f"{group}: trained to 32 letters", xlabel="letters", ylabel="percent right", xscale="log")
            axes.legend(fontsize="small", loc="center left", frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Follows products of a group for many steps.")
    parser.add_argument("--group", default="A5")
    parser.add_argument("--model", default="reflector")
    parser.add_argument("--tau", default="exact")
    parser.add_argument("--dimension", type=int, default=4, help="d of a head, and its columns")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--reflections", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64, help="units of other models")
    parser.add_argument("--lr", type=float, default=3e-2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--T", type=int, default=16384)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100, help="steps with the penalty")
    parser.add_argument("--ways", default=",".join(WAYS), help="those to try with reflectors")
    parser.add_argument("--out", type=Path, help="file of lines of JSON that the figures are added to")
    parser.add_argument("--table", type=Path, help="such a file, to print")
    parser.add_argument("--figure", type=Path, help="SVG of the accuracy over the length")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.table:
        told(
            [json.loads(line) for line in options.table.read_text().splitlines()],
            options.figure,
        )
        return
    found = measured(options)
    if options.out:
        with options.out.open("a") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
