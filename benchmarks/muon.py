"""ManifoldMuon beside AdamW and Muon: a classifier of digits, and a small transformer on the letters of a text.

    python -m benchmarks.muon digits --out runs/muon
    python -m benchmarks.muon letters --text FILE --out runs/muon
    python -m benchmarks.muon draw --out runs/muon

Each problem is trained by each optimizer at three rates, on one thread, with a schedule that ends at zero, and at the
rate with the lowest held-out loss from two more seeds. Every run is a line of `muon-PROBLEM.jsonl`, which a second call
goes on with. Muon and ManifoldMuon move the inner matrices, AdamW the rest at its own rate; ManifoldMuon
has them orthogonal times a learned gain.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stiefelkit as sk
from stiefelkit.metrics import orthogonality_error, rounding_limit
from stiefelkit.testing import seeds

OPTIMIZERS = ("adamw", "muon", "manifold_muon")
RATES = {"adamw": (3e-4, 1e-3, 3e-3), "muon": (3e-3, 1e-2, 3e-2), "manifold_muon": (0.01, 0.03, 0.1)}
SEEDS = (1, 2, 3)
REST = 3e-3
"""AdamW's rate for what is no inner matrix."""
DECAY = 0.01


@dataclass
class Run:
    """One training: what it was, and its curves."""

    optimizer: str
    rate: float
    seed: int
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    drifts: list[float] = field(default_factory=list)
    ms: float = 0.0

    @property
    def key(self) -> tuple[str, float, int]:
        """What tells it from others."""
        return self.optimizer, self.rate, self.seed


@dataclass(frozen=True)
class Problem:
    """A model, its inner matrices, and where its batches come from.

    Args:
        model: makes one.
        inner: names of the linear layers whose matrices Muon moves.
        batches: endless pairs of inputs and targets from a seed.
        held_out: inputs and targets that are not trained on.
        steps: of a training.
        every: steps between evaluations.
    """

    model: Callable[[], nn.Module]
    inner: Callable[[nn.Module], list[nn.Linear]]
    batches: Callable[[int], Iterator[tuple[Tensor, Tensor]]]
    held_out: tuple[Tensor, Tensor]
    steps: int
    every: int


def digits(steps: int) -> Problem:
    """scikit-learn's 1,797 digits of 8 x 8: 1,437 to train on, 360 held out; 64 - 256 - 256 - 256 - 10."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=seeds.generator(0))
    x, y = torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = seeds.generator(seed)
        while True:
            for rows in torch.randperm(1437, generator=generator)[:1408].split(128):
                yield x[rows], y[rows]

    def model() -> nn.Module:
        widths = (64, 256, 256, 256)
        inner = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*inner, nn.Linear(256, 10))

    def inner(net: nn.Module) -> list[nn.Linear]:
        return [m for m in net.modules() if isinstance(m, nn.Linear)][:-1]

    return Problem(model, inner, batches, (x[1437:], y[1437:]), steps, max(1, steps // 20))


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a norm and beside a residual path."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(b, t, width) to the same."""
        y = self.norms[0](x)
        q, k, v = (m(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.query, self.key, self.value))
        q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """Letters to the logarithms of the odds of the next one."""

    def __init__(self, letters: int, context: int, width: int = 128, heads: int = 4, depth: int = 2):
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, letters, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(b, t) to (b, t, letters)."""
        y = self.letter(x) + self.place(torch.arange(x.shape[-1], device=x.device))
        return self.head(self.norm(self.blocks(y)))


def letters(text: Path, steps: int) -> Problem:
    """The first 95 % of a text to train on, 64 windows of the rest held out; windows of 128 letters, batches of 32."""
    written = text.read_text(encoding="utf-8")
    alphabet = {letter: i for i, letter in enumerate(sorted(set(written)))}
    codes = torch.tensor([alphabet[letter] for letter in written])
    first, context = int(0.95 * len(codes)), 128

    def windows(starts: Tensor) -> tuple[Tensor, Tensor]:
        taken = codes[starts[:, None] + torch.arange(context + 1)]
        return taken[:, :-1], taken[:, 1:]

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = seeds.generator(seed)
        while True:
            yield windows(torch.randint(first - context - 1, (32,), generator=generator))

    def inner(net: nn.Module) -> list[nn.Linear]:
        return [m for block in net.blocks for m in block.modules() if isinstance(m, nn.Linear)]  # pyright: ignore

    held_out = windows(torch.linspace(first, len(codes) - context - 1, 64).long())
    return Problem(lambda: Transformer(len(alphabet), context), inner, batches, held_out, steps, max(1, steps // 20))


class Muon(torch.optim.Optimizer):
    """As torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"`, but for products in the dtype of the matrices.

    Its own are in bfloat16, which takes some hundred times as long on processors that have no unit for it.
    """

    def __init__(self, params: list[Tensor], lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.05)
                direction = newton_schulz(p.grad.lerp(momentum, 0.95))
                p.mul_(1 - group["lr"] * DECAY).add_(direction, alpha=-0.2 * group["lr"] * max(p.shape) ** 0.5)


def newton_schulz(x: Tensor) -> Tensor:
    """U V^T of X = U S V^T, nearly, by five quintics (Jordan et al., Muon, 2024)."""
    x = x / torch.linalg.matrix_norm(x).clamp(min=1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


def optimizers_of(net: nn.Module, inner: list[nn.Linear], name: str, rate: float) -> list[torch.optim.Optimizer]:
    """AdamW of everything, or another for the inner matrices and AdamW for the rest."""
    if name == "adamw":
        return [torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=DECAY)]
    matrices = [layer.weight for layer in inner]
    if name == "manifold_muon":
        for layer in inner:
            sk.orthogonal(layer, "weight", "stiefel", init="haar", gain="learned")
        groups = sk.optim.parameter_groups(net, lr=REST, stiefel={"lr": rate})
        return [sk.optim.ManifoldMuon(groups)]
    taken = set(map(id, matrices))
    rest = [p for p in net.parameters() if id(p) not in taken]
    return [Muon(matrices, rate), torch.optim.AdamW(rest, lr=REST, weight_decay=DECAY)]


def score(net: nn.Module, held_out: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Mean cross entropy in nats, and the share that is right."""
    with torch.no_grad():
        odds = net(held_out[0]).flatten(0, -2)
    target = held_out[1].flatten()
    return F.cross_entropy(odds, target).item(), (odds.argmax(-1) == target).double().mean().item()


def drift(inner: list[nn.Linear]) -> float:
    """The largest ||W^H W - I||_F over the rounding limit of the inner matrices over their mean singular value."""
    with torch.no_grad():
        weights = [layer.weight.double() for layer in inner]
        tall = [w if w.shape[0] >= w.shape[1] else w.mT for w in weights]
        frames = [w * w.shape[1] ** 0.5 / torch.linalg.matrix_norm(w) for w in tall]
        return max((orthogonality_error(w) / rounding_limit(w.shape[1], torch.float32)).item() for w in frames)


def train(problem: Problem, run: Run) -> Run:
    """Fills the curves of a run."""
    seeds.reseed(run.seed)
    net = problem.model()
    inner = problem.inner(net)
    optimizers = optimizers_of(net, inner, run.optimizer, run.rate)
    bases = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    took: list[float] = []
    batches = problem.batches(run.seed)
    for step in range(problem.steps):
        warm, left = (step + 1) / (0.05 * problem.steps), 1 - step / problem.steps
        share = min(1.0, warm, left / 0.5)
        for optimizer, rates in zip(optimizers, bases, strict=True):
            for group, base in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = base * share
        x, y = next(batches)
        began = time.process_time()
        loss = F.cross_entropy(net(x).flatten(0, -2), y.flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        took.append(time.process_time() - began)
        if (step + 1) % problem.every == 0 or step + 1 == problem.steps:
            lost, right = score(net, problem.held_out)
            run.steps.append(step + 1)
            run.losses.append(lost)
            run.accuracies.append(right)
            run.drifts.append(drift(inner))
    run.ms = 1e3 * statistics.median(took)
    return run


def read(path: Path) -> list[Run]:
    """The runs of a file, none if there is none."""
    return [Run(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def chosen(runs: list[Run]) -> dict[str, list[Run]]:
    """For each optimizer the runs at the rate whose loss at the end is lowest from the first seed."""
    best: dict[str, list[Run]] = {}
    for name in OPTIMIZERS:
        searched = [run for run in runs if run.optimizer == name and run.seed == SEEDS[0]]
        if searched:
            rate = min(searched, key=lambda run: run.losses[-1]).rate
            best[name] = [run for run in runs if (run.optimizer, run.rate) == (name, rate)]
    return best


def show(problem: str, runs: list[Run]) -> None:
    """Prints a row for each optimizer and rate, the chosen one marked."""
    best = {id(run) for alike in chosen(runs).values() for run in alike}
    print(f"{problem}: mean and spread over seeds at the end")
    print(f"{'optimizer':<16}{'rate':>8}{'seeds':>7}{'loss':>16}{'right':>9}{'ms a step':>11}{'drift':>10}")
    keys = sorted({run.key[:2] for run in runs}, key=lambda key: (OPTIMIZERS.index(key[0]), key[1]))
    for key in keys:
        alike = [run for run in runs if run.key[:2] == key]
        losses = [run.losses[-1] for run in alike]
        spread = statistics.stdev(losses) if len(losses) > 1 else math.nan
        right = statistics.fmean(run.accuracies[-1] for run in alike)
        ms, most = min(run.ms for run in alike), max(max(run.drifts) for run in alike)
        mark = "*" if id(alike[0]) in best else ""
        print(
            f"{key[0] + mark:<16}{key[1]:>8g}{len(alike):>7}{statistics.fmean(losses):>9.4f} ± {spread:.4f}"
            f"{right:>9.4f}{ms:>11.2f}{most:>10.3g}"
        )


def draw(problem: str, runs: list[Run], out: Path) -> Path:
    """Draws the curves of the chosen rates: means over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    loss, orthogonality = figure.subplots(1, 2)
    for name, alike in chosen(runs).items():
        label = f"{name}, rate {alike[0].rate:g}, {min(run.ms for run in alike):.1f} ms a step"
        loss.plot(
            alike[0].steps, [statistics.fmean(at) for at in zip(*(r.losses for r in alike), strict=True)], label=label
        )
        orthogonality.plot(alike[0].steps, [max(at) for at in zip(*(r.drifts for r in alike), strict=True)])
    loss.set(xlabel="steps", ylabel="held-out loss in nats", yscale="log")
    orthogonality.set(xlabel="steps", ylabel="‖WᴴW − I‖ over the rounding limit", yscale="log")
    loss.legend(fontsize=7)
    path = out / f"muon-{problem}.png"
    figure.savefig(path, dpi=100)
    return path


def main() -> int:
    """Trains what is not trained yet and prints the table; or draws what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("digits", "letters", "draw"))
    parser.add_argument("--text", type=Path, help="file of the letters, UTF-8")
    parser.add_argument("--steps", type=int, help="of each training; 600 on digits, 1000 on letters")
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--out", type=Path, default=Path("runs/muon"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.what == "draw":
        for path in sorted(asked.out.glob("muon-*.jsonl")):
            name, runs = path.stem.removeprefix("muon-"), read(path)
            show(name, runs)
            print(f"Figure: {draw(name, runs, asked.out)}")
        return 0
    if asked.what == "letters" and asked.text is None:
        parser.error("letters needs --text FILE, got none.")
    problem = digits(asked.steps or 600) if asked.what == "digits" else letters(asked.text, asked.steps or 1000)
    path = asked.out / f"muon-{asked.what}.jsonl"
    runs = read(path)
    trained = {run.key for run in runs}
    for seed in SEEDS[: asked.seeds]:
        for name in OPTIMIZERS:
            rates = RATES[name] if seed == SEEDS[0] else [chosen(runs)[name][0].rate]
            for rate in rates:
                if (name, rate, seed) not in trained:
                    runs.append(train(problem, Run(name, rate, seed)))
                    with path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(runs[-1])) + "\n")
    show(asked.what, runs)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
