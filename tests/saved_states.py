"""Modules and optimizers whose states lie in tests/data, one folder a version, and the program that wrote them.

    python tests/saved_states.py tests/data/v0_1   # with the code of that version

A folder holds `states.pt`, of tensors alone, `run`, what `stiefelkit train` left after two steps, and the tensors of
the same run after four. It stays as it was written: what a later version saves goes into a folder of its own.
"""

import copy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit.cli import main
from stiefelkit.testing import seeds

DATA = Path(__file__).parent / "data"
HAAR: dict[str, Any] = dict(init="haar")
C64, C128 = torch.complex64, torch.complex128


def weight(name: str, rows: int = 5, columns: int = 5, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A linear layer of a map; the dtype is that of its weight."""
    return sk.orthogonal(nn.Linear(columns, rows, bias=False, dtype=dtype), "weight", name, **options)


def rebased(dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A layer whose base has moved, and whose coordinates have moved since."""
    layer = weight("rebased", dtype=dtype, **HAAR, **options)
    sk.rebase_(layer, "weight")
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return layer


def convolution(view: str, groups: int = 1) -> nn.Module:
    return sk.orthogonal(nn.Conv2d(2 * groups, 3 * groups, 2, groups=groups), "weight", "householder", view=view)


def tied() -> nn.Module:
    net = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
    sk.tie(sk.orthogonal(net["first"], "weight", "cayley", **HAAR), "weight", net["second"], "weight")
    return net


WEIGHTS: dict[str, Callable[[], nn.Module]] = {
    "cayley": lambda: weight("cayley", **HAAR),
    "cayley, negative": lambda: weight("cayley", negative=2),
    "cayley, bandwidth": lambda: weight("cayley", bandwidth=2),
    "cayley, complex": lambda: weight("cayley", dtype=C64, **HAAR),
    "cayley, float64": lambda: weight("cayley", dtype=torch.float64, **HAAR),
    "cayley, bfloat16": lambda: weight("cayley", dtype=torch.bfloat16, **HAAR),
    "cayley, tall": lambda: weight("cayley", 7, 4, **HAAR),
    "cayley, wide": lambda: weight("cayley", 4, 7, dtype=C128, **HAAR),
    "cayley, gain": lambda: weight("cayley", gain=2.0, **HAAR),
    "cayley, learned gain": lambda: weight("cayley", gain="learned", **HAAR),
    "cayley, tied": tied,
    "fourier": lambda: weight("fourier", 6, 6, C64),
    "givens": lambda: weight("givens", layers=3, init="haar"),
    "givens, fft": lambda: weight("givens", 8, 8, layout="fft"),
    "givens, complex": lambda: weight("givens", dtype=C64, **HAAR),
    "householder": lambda: weight("householder", reflections=3, init="haar"),
    "householder, complex": lambda: weight("householder", 6, 4, C64, **HAAR),
    "householder, out_by_rest": lambda: convolution("out_by_rest"),
    "householder, per_tap": lambda: convolution("per_tap"),
    "householder, group_in_by_rest": lambda: convolution("group_in_by_rest", groups=2),
    "margin": lambda: weight("margin", u="householder", margin=0.2, init="haar"),
    "margin, complex": lambda: weight("margin", 6, 4, C64, **HAAR),
    "matrix_exp": lambda: weight("matrix_exp", **HAAR),
    "matrix_exp, complex": lambda: weight("matrix_exp", dtype=C64, **HAAR),
    "matrix_exp, tall": lambda: weight("matrix_exp", 7, 4, **HAAR),
    "rebased": rebased,
    "rebased, complex": lambda: rebased(C64, inner="cayley"),
    "stiefel": lambda: weight("stiefel", 6, 4, **HAAR),
    "stiefel, complex": lambda: weight("stiefel", dtype=C64, **HAAR),
    "stiefel, learned gain": lambda: weight("stiefel", gain="learned", **HAAR),
}
MODELS = ["eurnn", "exprnn", "full_urnn", "goru", "gru", "henaff_rnn", "irnn", "lie_urnn", "lstm", "margin_rnn", "ornn"]
MODELS += ["restricted_urnn", "scornn", "scurnn"]
NETS: dict[str, Callable[[], nn.Module]] = {
    "GORU": lambda: sk.nn.GORU(3, 4, trainable_h0=True),
    "LinearTransitionRNN": lambda: sk.nn.LinearTransitionRNN(3, 4),
    "OrthogonalRNN": lambda: sk.nn.OrthogonalRNN(3, 4, num_layers=2, bidirectional=True, trainable_h0=True),
    "OrthogonalRNN, complex": lambda: sk.nn.OrthogonalRNN(3, 4, field="complex", parametrization="stiefel"),
    **{name: lambda name=name: sk.models.create(name, 3, 8, 2) for name in MODELS},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "MultiplicativeCayley": dict(precondition="rmsprop", momentum=0.5, centered=True, weight_decay=1e-3),
    "CayleySGD": dict(momentum=0.5, nesterov=True),
    "CayleyAdam": dict(amsgrad=True, betas=(0.8, 0.95)),
    "POGO": dict(base="adam", precision="fast"),
}
RUN = "train copying --model full_urnn --T 3 --train-size 20 --test-size 10 --hidden-size 4 --batch-size 5"
RUN += " --optimizer multiplicative_cayley --log-every 1 --eval-every 2 --checkpoint-every 2"


def frames_and_coordinates() -> nn.Module:
    """What optimizers of frames move: frames of each field, in two dtypes, and coordinates."""
    return nn.Sequential(
        weight("stiefel", **HAAR),
        weight("stiefel", 6, 4, dtype=C64, **HAAR),
        weight("stiefel", 4, 6, dtype=torch.float64, **HAAR),
        weight("cayley", **HAAR),
    )


def optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return getattr(sk.optim, name)(sk.optim.parameter_groups(model, lr=0.01), **OPTIMIZERS[name])


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Every parametrized weight of a module, by its name."""
    held: Any = {prefix: (host, host._modules.get("parametrizations")) for prefix, host in module.named_modules()}
    return {f"{at}.{name}": getattr(host, name).detach() for at, (host, own) in held.items() for name in own or ()}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> None:
    for p, g in zip(model.parameters(), gradients, strict=True):
        p.grad = g.clone()
    optimizer.step()


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})


def module_record(build: Callable[[], nn.Module]) -> dict[str, Any]:
    module = build()
    return {"state": dict(module.state_dict()), "weights": weights(module)}


def net_record(build: Callable[[], nn.Module]) -> dict[str, Any]:
    net, x = build(), torch.randn(2, 3, 3)
    out = net(x)
    return module_record(lambda: net) | {"x": x, "out": (out[0] if isinstance(out, tuple) else out).detach()}


def optimizer_record(name: str) -> dict[str, Any]:
    model = frames_and_coordinates()
    moves = optimizer(name, model)
    gradients = [[torch.randn_like(p) for p in model.parameters()] for _ in range(3)]
    for each in gradients[:2]:
        step(model, moves, each)
    before = states(model, moves)
    step(model, moves, gradients[2])
    return {"before": before, "gradients": gradients[2], "after": states(model, moves)}


def write(folder: Path) -> None:
    torch.manual_seed(seeds.seed(0))
    run, longer = folder / "run", folder / "longer"
    assert main([*RUN.split(), "--steps", "2", "--out", str(run)]) == 0
    shutil.copytree(run, longer)
    resume(longer, 4)
    (run / ".lock").unlink()
    (tensors,) = (longer / "checkpoints" / "step-00000004").glob("*.safetensors")
    shutil.move(tensors, folder / "run-after-4-steps.safetensors")
    shutil.rmtree(longer)
    saved = {
        "weights": {name: module_record(build) for name, build in WEIGHTS.items()},
        "nets": {name: net_record(build) for name, build in NETS.items()},
        "optimizers": {name: optimizer_record(name) for name in OPTIMIZERS},
    }
    torch.save(saved, folder / "states.pt")


def resume(run: Path, steps: int) -> None:
    assert main(["train", "copying", "--steps", str(steps), "--out", str(run), "--resume"]) == 0


if __name__ == "__main__":
    write(Path(sys.argv[1]))
