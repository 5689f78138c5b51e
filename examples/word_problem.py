"""How far nets follow the products of a group, and three ways to make one of reflections follow them for ever.

    stiefelkit train words --group A5 --model reflector --test-T 16384 --test-size 16 --out runs/a5
    python examples/word_problem.py runs/a5 --out runs.jsonl
    python examples/word_problem.py --table runs.jsonl --figure far.svg

The first line trains a net on words of at most 32 letters. The second prints the accuracy of the last eighth of the
first 256, 1,024, ... letters of longer words, as the log of the run has it, and for nets of reflections that of three
others made of the net:

* penalty: trained for some more steps with the squared distance of W_b W_a from W_ab as part of the loss, where W_a is
  the transition of letter a, and training data tell the letter ab;
* snapped: transitions moved to an exact representation: which letter two letters make is asked of the net, and each W_b
  becomes the polar factor of the mean over a of W_ab times the inverse of W_a, until nothing changes, which ends at a
  representation if it begins near one. Heads near none are switched off, and the read-out becomes the nearest state;
* contracted: as trained, but after every 32 letters the state becomes that of the letter which the net answers.

The third prints a table of all runs in a file, and draws the mean accuracy over the length.
"""

import argparse
import copy
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit.figure import figure
from stiefelkit.training import checkpoint
from stiefelkit.training.plot import AT
from stiefelkit.training.run_folder import RunFolder, by_kind
from stiefelkit.training.tasks.words import Words, products

LENGTHS = ("256", "1024", "4096", "16384")
WAYS = ("trained", "penalty", "snapped", "contracted")
COLORS = {"exact": "C0", "free": "C3", "gated": "C1"}
"""Of nets of reflections in the figure, by tau; others are grey."""
NEAR = 0.5
"""Distance from a representation, over |W|, up to which a head is moved to it."""


def transitions(layer: sk.nn.ReflectorRNN) -> Tensor:
    """Returns the product of reflections of every letter in every head, (G, heads, d, d): what it makes of identities.

    States of a head have d columns.
    """
    d, dtype = layer.columns, next(layer.parameters()).dtype
    eye = torch.eye(d, dtype=dtype).expand(layer.heads, d, d)
    letters = torch.eye(layer.input_size, dtype=dtype)[:, None]
    return layer(letters, eye.flatten().expand(1, len(letters), -1))[0][:, 0].unflatten(-1, eye.shape)


def defects(w: Tensor, table: Tensor) -> Tensor:
    """Returns the squared distances of W_b W_a from W_ab, (G, G, heads), over d."""
    return (w[None] @ w[:, None] - w[table]).square().sum((-1, -2)) / w.shape[-1]


class Contracted(nn.Module):
    """A net whose state becomes, after every so many letters, that of the letter answered."""

    def __init__(self, model: Any, every: int = 32):
        super().__init__()
        self.model, self.every = model, every

    def forward(self, x: Tensor) -> Tensor:
        """Returns answers to one-hot letters."""
        model, state, found = self.model, None, []
        orbit = model.rnn(torch.eye(x.shape[-1])[:, None])[1]
        for part in x.split(self.every, 1):
            found.append(model.output(model.rnn(part, state)[0]))
            state = orbit[:, found[-1][:, -1].argmax(-1)]
        return torch.cat(found, 1)


@torch.no_grad()
def learned_products(model: nn.Module, size: int) -> Tensor:
    """Returns what the net answers to every word of two letters, (G, G)."""
    words = torch.cartesian_prod(torch.arange(size), torch.arange(size))
    return model(torch.eye(size)[words])[:, -1].argmax(-1).unflatten(0, (size, size))


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
    layer, output, w = model.rnn, model.output, transitions(copy.deepcopy(model.rnn).double())
    exact = representation(w, table)
    left, moved = defects(exact, table).amax((0, 1)), (exact - w).square().sum((-1, -2)).mean(0) / layer.columns
    is_near = (left.sqrt() < 1e-9) & (moved.sqrt() < NEAR)
    if not is_near.any():
        return 0
    exact = torch.where(is_near[:, None, None], exact, torch.eye(layer.columns, dtype=w.dtype))
    keys = torch.stack([torch.stack([reflections_of(head, layer.reflections) for head in one]) for one in exact])
    layer.weight_ih_l0[: keys[0].numel()] = keys.transpose(1, 2).flatten(1).mT
    layer.weight_ih_l0[keys[0].numel() :] = 40.0  # sigmoid(40) is 1
    states = layer(torch.eye(len(w))[:, None])[1][0]
    output.weight.copy_(states / states.norm(dim=-1, keepdim=True))
    output.bias.zero_()
    return int(is_near.sum())


def penalize_(model: Any, task: Words, run: RunFolder, steps: int) -> None:
    """Trains on with the distance from a representation as part of the loss."""
    table, opt = products(task.group), torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for step in range(steps):
        x, y = task.batch(run.config.steps + step, 32, run.config.seed)
        opt.zero_grad()
        (task.loss(model(x), y) + defects(transitions(model.rnn), table).mean()).backward()
        opt.step()
        schedule.step()


def measured(path: Path, ways: list[str], steps: int) -> dict[str, Any]:
    """Returns the accuracies by position of a trained net, and of those that are made of it."""
    run = RunFolder.open(path)
    config, task, log = run.config, run.config.build_task(), by_kind(run)
    saved = checkpoint.latest(run.checkpoints)
    if not isinstance(task, Words) or saved is None:
        raise SystemExit(f"word_problem.py needs a finished run of the task words, got {path}.")
    model, table = config.build_model(task), products(task.group)
    ends = [line["step"] for line in log["train"]]
    steps_of = zip(log["train"], [0, *ends[:-1]], strict=True)
    seconds = sum(line["ms_per_step"] * (line["step"] - before) / 1e3 for line, before in steps_of)
    settings = ("model", "seed", "hidden_size", "steps", "batch_size", "lr", "options")
    found: dict[str, Any] = {"group": task.group} | {name: vars(config)[name] for name in settings}
    found |= {"parameters": run.parameters, "cpu_seconds": round(seconds, 1)}
    for name in ways if config.options.get("additive") is False else ways[:1]:
        model.load_state_dict(saved[1]["model"])
        if name == "penalty":
            penalize_(model, task, run, steps)
        elif name == "snapped":
            found["heads_near"] = snap_(model, learned_products(model, len(table)))
        net = Contracted(model) if name == "contracted" else model
        scores = log["test"][-1] if name == "trained" else task.evaluate(net)
        found[name] = {key[len(AT) :]: round(score, 5) for key, score in scores.items() if key.startswith(AT)}
        print(f"{name:11}", *(f"{p}: {100 * found[name][p]:.2f} %  " for p in LENGTHS if p in found[name]), flush=True)
    return found


def name_of(run: dict[str, Any], how: str) -> str:
    """Returns the name of a kind of net."""
    name = f"reflector, {run['options'].get('tau', 'exact')}" if run["model"] == "reflector" else run["model"]
    return name if how == "trained" else f"{name}, {how}"


def by_name(runs: list[dict[str, Any]], group: str) -> dict[str, list[dict[str, Any]]]:
    """Returns by kind of net, in order, the accuracies of runs of a group, each from lengths to numbers."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run, how in sorted(itertools.product(runs, WAYS), key=lambda pair: name_of(*pair)):
        if how in run and run["group"] == group:
            found.setdefault(name_of(run, how), []).append(run[how])
    return found


def cell(found: list[dict[str, float]], length: str) -> str:
    """Returns the mean of some runs in percent, a worst that is a point below in parentheses; a dash without tests."""
    scores = [100 * accuracy[length] for accuracy in found if length in accuracy]
    if not scores:
        return "-"
    mean, worst = statistics.fmean(scores), min(scores)
    return f"{mean:.1f}" if mean - worst < 1 else f"{mean:.1f} ({worst:.1f})"


def span(numbers: list[float]) -> str:
    """Returns the least and the largest of some numbers, as integers."""
    ends = sorted({round(number) for number in numbers})
    return " to ".join(f"{end:,}" for end in dict.fromkeys([ends[0], ends[-1]])) if ends else "-"


def tell(runs: list[dict[str, Any]]) -> None:
    """Prints the accuracy of the seeds of each kind of net, in percent, and what they have cost."""
    groups = {group: by_name(runs, group) for group in sorted({run["group"] for run in runs})}
    heads = [f"{group}: {int(LENGTHS[0]):,} | " + " | ".join(f"{int(p):,}" for p in LENGTHS[1:]) for group in groups]
    print(f"| net | {' | '.join(heads)} |")
    print("|" + "---|" * (1 + len(LENGTHS) * len(groups)))
    for name in sorted({name for found in groups.values() for name in found}):
        cells = [cell(found.get(name, []), length) for found in groups.values() for length in LENGTHS]
        print(f"| {name} | {' | '.join(cells)} |")
    for group, found in groups.items():
        of = [run for run in runs if run["group"] == group]
        seeds = span([len(each) for each in found.values()])
        ours, others = (
            [r["cpu_seconds"] for r in of if (r["model"] == "reflector") == is_ours] for is_ours in (True, False)
        )
        sizes = f"{span([run['parameters'] for run in of])} parameters"
        print(f"{group}: {seeds} seeds, {sizes}, CPU seconds {span(ours)} for reflectors, {span(others)} for others.")


def draw(runs: list[dict[str, Any]], file: Path) -> None:
    """Draws mean accuracies over the length, as trained and snapped, a panel for each group."""
    runs = [{key: found for key, found in run.items() if key not in ("penalty", "contracted")} for run in runs]
    groups = sorted({run["group"] for run in runs})
    with figure(file, len(groups)) as panels:
        for axes, group in zip(panels, groups, strict=True):
            greys = itertools.cycle(["-", "--", "-.", ":"])
            kinds = by_name(runs, group)
            for name in sorted(kinds, key=lambda name: ("snapped" not in name, name)):  # wide lines are behind others
                found = kinds[name]
                lengths = [*found[0]]
                means = [100 * statistics.fmean(accuracy[length] for accuracy in found) for length in lengths]
                color = next((color for tau, color in COLORS.items() if tau in name), None)
                look: dict[str, Any] = {"color": color or "0.6"}
                if color is None:
                    look["linestyle"] = next(greys)
                if "snapped" in name:
                    look |= {"linewidth": 5, "alpha": 0.35}
                axes.plot([*map(int, lengths)], means, label=name.removeprefix("reflector, "), **look)
            axes.set(title=f"{group}: trained to 32 letters", xlabel="letters", ylabel="percent right", xscale="log")
            axes.legend(fontsize="small", loc="center", bbox_to_anchor=(0.38, 0.43), frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Follows products of a group for many steps.")
    parser.add_argument("runs", type=Path, nargs="*", help="folders of runs of the task words")
    parser.add_argument("--steps", type=int, default=100, help="steps with the penalty")
    parser.add_argument("--ways", default=",".join(WAYS), help="those to try with reflections")
    parser.add_argument("--out", type=Path, help="file of lines of JSON that the figures are added to")
    parser.add_argument("--table", type=Path, help="such a file, to print")
    parser.add_argument("--figure", type=Path, help="SVG of the accuracy over the length")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for run in options.runs:
        found = measured(run, options.ways.split(","), options.steps)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
    if options.table:
        runs = [json.loads(line) for line in options.table.read_text().splitlines()]
        tell(runs)
        if options.figure:
            draw(runs, options.figure)


if __name__ == "__main__":
    main()
