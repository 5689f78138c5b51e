"""A whole training step of scoRNN, and the scan within it."""

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from stiefelkit import models
from stiefelkit.measuring.races.scan_cases import ScanCase
from stiefelkit.models import SequenceModel
from stiefelkit.optim import parameter_groups
from stiefelkit.weights.change import bake

__all__ = ["CLASSES", "MODEL", "whole_and_scan"]

MODEL = "scornn"
CLASSES = 10


def whole_and_scan(case: ScanCase, device: torch.device, seed: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Returns a training step of scoRNN, and the forward and backward of its scan alone.

    The step draws nothing: it is zero_grad, the map to W, the scan, the read-out of the last state, cross-entropy over
    ten classes, the backward of all, and RMSprop with the rates of the paper. The scan alone has the same input, input
    weights and bias, and a W that is given, whose gradient it takes too. Sizes are those of a real net; the seed fixes
    weights and data.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x, y = torch.rand(case.B, case.T, case.m).to(device), torch.randint(CLASSES, (case.B,)).to(device)
        model = cast(SequenceModel, models.create(MODEL, case.m, case.n, CLASSES).to(device))
        g = (torch.randn(case.B, case.n) / case.n**0.5).to(device)
    optimizer = torch.optim.RMSprop(parameter_groups(model, lr=1e-3, skew={"lr": 1e-4}), alpha=0.9)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x, last_only=True), y).backward()
        optimizer.step()

    rnn = copy.deepcopy(model.rnn)
    bake(rnn, "weight_hh_l0")
    # The signs of the bias decide how fast the scan is: it is the model's own, wherever the steps take it.
    for name in ("weight_ih_l0", "bias_l0"):
        setattr(rnn, name, getattr(model.rnn, name))
    alone = SequenceModel(rnn, cast(nn.Linear, nn.Identity()))
    parameters = list(rnn.parameters())
    return step, lambda: torch.autograd.grad(alone(x, last_only=True), parameters, g)
