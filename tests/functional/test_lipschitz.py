"""The norm of a layer is that of its matrix, by whichever road, and no layer is called linear that is none."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors, metrics
from stiefelkit.metrics import lipschitz

PADDED = ("circular", "zeros", "reflect", "replicate")
WINDOWS = [(3, 1, 1, 1, 1), (2, 2, 0, 1, 2), (3, 1, 2, 2, 1), (3, 2, 2, 2, 1)]
"""Kernel, stride, padding, dilation, groups."""
TURNED = [(3, 1, 1, 1, 1), (3, 2, 1, 1, 1), (4, 3, 0, 1, 2)]
SIZE = (4, 6, 8)


def values_of(layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Singular values of the matrix that a layer applies, column by column."""
    columns = torch.eye(math.prod(shape), dtype=dtype).view(-1, *shape)
    with torch.no_grad():
        matrix = (layer(columns) - layer(torch.zeros_like(columns))).flatten(1)
    return torch.linalg.svdvals(matrix.to(torch.complex128 if dtype.is_complex else torch.float64))


def required(layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    """Compares both roads with the matrix."""
    true = values_of(layer, shape, dtype)
    found = lipschitz(layer, shape, dtype=dtype)
    assert found.largest == found.bound == pytest.approx(true.max().item(), rel=1e-5)
    assert found.smallest == pytest.approx(true.min().item(), abs=1e-5 * found.largest)
    within = lipschitz(layer, shape, exact=False, steps=40, dtype=dtype)
    assert not within.is_exact
    assert within.largest <= found.largest * (1 + 1e-5)
    assert within.largest >= found.largest * (1 - max(within.residual, 1e-5))
    assert within.smallest >= found.smallest - 1e-3 * found.largest
    assert within.bound >= found.largest * (1 - 1e-5)
    return found


@pytest.mark.parametrize("mode", PADDED)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_the_norm_of_a_convolution_is_that_of_its_matrix(window: Any, mode: Any) -> None:
    assert required(nn.Conv2d(4, 6, *window, padding_mode=mode), SIZE).is_exact


@pytest.mark.parametrize("window", TURNED, ids=str)
def test_the_norm_of_a_transposed_convolution_is_that_of_its_matrix(window: tuple[int, ...]) -> None:
    kernel, stride, padding, dilation, groups = window
    layer = nn.ConvTranspose2d(4, 6, kernel, stride, padding, stride - 1, groups, dilation=dilation)
    assert required(layer, (4, 4, 5)).is_exact


class _Padded(nn.Module):
    """A chain that pads by itself, which no class of torch's tells."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular")
        self.second = nn.Conv1d(4, 5, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).flip(1))


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...], torch.dtype]] = {
    "wide": (nn.Linear(9, 5), (9,), torch.float32),
    "along time": (nn.Linear(9, 5), (6, 9), torch.float32),
    "in time": (nn.Conv1d(3, 5, 5, padding="same"), (3, 12), torch.float32),
    "in space": (nn.Conv3d(2, 3, 3, padding=1, padding_mode="circular"), (2, 3, 4, 4), torch.float32),
    "chain": (_Padded(), (3, 8), torch.float32),
    "mean": (nn.AvgPool2d(2), (2, 4, 4), torch.float32),
    "complex": (nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular", dtype=torch.complex64), (3, 8), torch.complex64),
    "complex padded": (nn.Conv1d(3, 4, 3, padding=1, dtype=torch.complex64), (3, 8), torch.complex64),
    "double": (nn.Linear(5, 9, dtype=torch.float64), (5,), torch.float64),
}


@pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS)
def test_the_norm_of_any_linear_layer_is_that_of_its_matrix(case: tuple[nn.Module, tuple[int, ...], Any]) -> None:
    layer, shape, dtype = case
    assert required(layer, shape, dtype).is_exact


def test_a_convolution_whose_kernel_is_a_frame_is_not_1_lipschitz_and_one_without_overlap_is() -> None:
    def convolution(kernel: int, stride: int, gain: float = 1.0) -> nn.Module:
        layer = nn.Conv2d(8, 8, kernel, stride, (kernel - stride + 1) // 2, padding_mode="circular")
        return sk.orthogonal(layer, "weight", view="out_by_rest", gain=gain)

    found = lipschitz(convolution(3, 1), (12, 12))
    assert found.is_exact
    assert 1.5 < found.largest <= 3
    assert lipschitz(convolution(3, 1, gain=1 / 3), (12, 12)).largest <= 1 + 1e-6
    for values in (lipschitz(convolution(2, 2), (12, 12)), lipschitz(convolution(1, 1), (12, 12))):
        assert values.largest == pytest.approx(1, abs=1e-5)
        assert values.smallest == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_linear_layers_of_frames_are_isometries_without_a_size_or_a_bias(dtype: torch.dtype) -> None:
    layer = sk.orthogonal(nn.Linear(12, 12, dtype=dtype), "weight")
    with torch.no_grad():
        layer.bias.fill_(1e3)
    for found in (lipschitz(layer), lipschitz(layer, exact=False)):
        assert found.largest == pytest.approx(1, abs=1e-5)
        assert found.smallest == pytest.approx(1, abs=1e-5)
    adapter = sk.nn.OrthogonalAdapter(nn.Linear(12, 5))
    assert lipschitz(adapter, 12).largest == pytest.approx(
        values_of(adapter, (12,), torch.float32).max().item(), rel=1e-5
    )


@pytest.mark.parametrize("mode", PADDED)
def test_what_is_too_large_to_take_apart_is_bounded_from_both_sides(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_WORK", 1000)
    for window in WINDOWS:
        layer = nn.Conv2d(4, 6, *window, padding_mode=mode)
        true = values_of(layer, SIZE, torch.float32).max().item()
        found = lipschitz(layer, SIZE)
        assert not found.is_exact or mode == "circular"
        assert found.largest * (1 - 1e-5) <= true <= found.bound * (1 + 1e-5)
        assert lipschitz(layer, SIZE, exact=True).largest == pytest.approx(true, rel=1e-5)


TIGHT = {
    "zeros": (nn.Conv2d(8, 8, 5, padding=2), (8, 32, 32)),
    "large": (nn.Conv2d(4, 4, 3, padding=1), (4, 60, 60)),
    "valid": (nn.Conv1d(4, 10, 5, groups=2), (4, 400)),
    "strided": (nn.Conv2d(8, 8, 5, 2, 2), (8, 40, 40)),
    "dilated": (nn.Conv2d(6, 3, 3, padding=4, dilation=4), (6, 60, 60)),
    "transposed": (nn.ConvTranspose2d(8, 6, 5, 2, 2), (8, 20, 20)),
    "reflected": (nn.Conv2d(8, 8, 5, padding=2, padding_mode="reflect"), (8, 24, 24)),
    "replicated and strided": (nn.Conv2d(8, 8, 3, 2, 1, padding_mode="replicate"), (8, 24, 24)),
    "bfloat16": (nn.Conv2d(8, 8, 3, padding=1).bfloat16(), (8, 32, 32)),
    "half": (nn.Conv2d(8, 8, 3, padding=1).half(), (8, 32, 32)),
    "complex": (nn.Conv1d(6, 6, 5, padding=2, dtype=torch.complex64), (6, 200)),
}


@pytest.mark.parametrize("case", TIGHT.values(), ids=TIGHT)
def test_the_bound_of_a_convolution_is_tight(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_WORK", 1000)
    layer, shape = case
    operator = metrics._Operator(layer, shape, None)
    with operator.held(), monkeypatch.context() as patched:
        patched.setattr(metrics, "_NEAR", 0.0)
        true = metrics._lanczos(operator, 150).largest
    found = lipschitz(layer, shape)
    rounding = 10 * torch.finfo(layer.weight.dtype).eps
    assert 0.98 * true <= found.largest <= true * (1 + rounding) <= found.bound * (1 + 2 * rounding)
    assert found.bound <= 1.025 * true


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e25])
@pytest.mark.parametrize("exact", [True, False])
def test_small_and_large_weights_have_their_norm(scale: float, exact: bool) -> None:
    layer = nn.Conv2d(3, 4, 3, padding=1)
    true = lipschitz(layer, (12, 12), exact=True).largest
    with torch.no_grad():
        layer.weight.mul_(scale)
    found = lipschitz(layer, (12, 12), exact=exact)
    assert found.largest <= true * scale * (1 + 1e-4)
    assert true * scale * (1 - 1e-4) <= found.bound <= 1.05 * true * scale


def test_the_bound_of_a_layer_that_torch_has_not_grows_tight_with_steps() -> None:
    layer = nn.Linear(400, 300)
    true = lipschitz(layer).largest
    short, long = (lipschitz(layer, exact=False, steps=steps) for steps in (40, 150))
    assert true <= long.bound * (1 + 1e-5)
    assert long.bound < 1.02 * true < short.bound


class _Shifted(nn.Conv2d):
    """A convolution that does more than torch's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 5 * super().forward(input)


def test_a_layer_is_measured_by_what_it_does_and_not_by_its_class() -> None:
    layer = _Shifted(3, 3, 3, padding=1)
    hooked = nn.Conv2d(3, 3, 3, padding=1)
    hooked.register_forward_hook(lambda *arguments: 2 * arguments[-1])
    for each in (layer, hooked):
        assert required(each, (3, 5, 5)).is_exact


NONLINEAR = [nn.Hardtanh(-50, 50), nn.Softmax(-1), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.LSTM(6, 6)]


@pytest.mark.parametrize("layer", NONLINEAR, ids=lambda layer: type(layer).__name__)
def test_a_layer_that_is_not_linear_is_refused(layer: nn.Module) -> None:
    with pytest.raises(errors.OptionError, match=type(layer).__name__):
        lipschitz(layer, (3, 6))


@pytest.mark.parametrize("size", [None, (4, 4, 4)], ids=str)
def test_sizes_that_a_layer_does_not_take_are_refused(size: Any) -> None:
    with pytest.raises(errors.StiefelkitError, match="input_size"):
        lipschitz(nn.Conv2d(3, 3, 3), size)


def test_measuring_changes_nothing() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    layer[0].eval()
    state = torch.get_rng_state()
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    with torch.no_grad():
        first = lipschitz(layer, 4)
    assert first == lipschitz(layer, 4)
    assert [module.training for module in layer] == [False, True, True]
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())
    assert all(p.grad is None for p in layer.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_what_has_no_finite_norm_is_refused():
    for scale, word in {1e30: "products", 1e-44: "bias", torch.nan: "weights"}.items():
        conv = nn.Conv2d(3, 3, 3, padding=1)
        conv.weight.data.mul_(scale)
        with pytest.raises(errors.OptionError if scale == 1e-44 else errors.NonFiniteError, match=word):
            sk.metrics.lipschitz(nn.Sequential(conv, conv) if scale == 1e30 else conv, (3, 40, 40))
    for layer, word in ((nn.Linear(3, 5, device="meta"), "meta"), (nn.LazyConv2d(3, 3), "lazy")):
        with pytest.raises((errors.NonFiniteError, errors.OptionError), match=word):
            sk.metrics.lipschitz(layer, (8, 8))
