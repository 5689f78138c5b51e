"""`torch.onnx.export(dynamo=True)` of baked nets: the file that it writes runs elsewhere, to 1e-5."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.nn import OrthogonalRNN

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

PAGE = Path(__file__).parents[2] / "docs" / "recurrence.md"
STEPS, BATCH = torch.export.Dim("steps"), torch.export.Dim("batch")


def exported(net: nn.Module, path: Path, dims: dict[int, Any], x: torch.Tensor | None = None) -> Any:
    """Runs what was written from a baked copy of a net, on inputs of other sizes than those of the export."""
    plain = sk.bake(copy.deepcopy(net)).eval()
    arguments = (torch.randn(5, 3, 3) if x is None else x,)
    torch.onnx.export(plain, arguments, path, dynamo=True, verbose=False, dynamic_shapes=(dims,))
    session = onnxruntime.InferenceSession(path)

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.from_numpy(out) for out in session.run(None, {session.get_inputs()[0].name: x.numpy()})]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("scurnn", "goru", "henaff_rnn", "gru", "rotrnn", "lru")),
        ("lstm", dict(parametrization="cayley", num_layers=2, bidirectional=True)),
    ],
)
def test_models_run_in_onnx_at_any_length(name, options, tmp_path):
    net: Any = sk.models.create(name, 3, 8, 2, **options)
    with torch.no_grad():
        for key, p in net.rnn.named_parameters(recurse=False):
            # modReLU with a positive bias jumps at 0, which no rounding survives.
            if not key.startswith("weight_hh"):
                p.uniform_(-0.5, 0.0 if key.startswith("bias_l") else 0.5)
    run = exported(net, tmp_path / "model.onnx", {0: BATCH, 1: STEPS})
    x = torch.randn(2, 40, 3)
    assert torch.allclose(run(x)[0], net(x), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_net_taken_over_from_torch_runs_in_onnx_at_any_length_as_the_page_says(tmp_path, monkeypatch):
    (printed,) = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    source = nn.RNN(3, 4, 2, bidirectional=True)
    for name, weight in source.named_parameters():
        if name.startswith("weight_hh"):
            nn.init.orthogonal_(weight)
    rnn = OrthogonalRNN.from_torch(source)
    monkeypatch.chdir(tmp_path)
    exec(printed, {"torch": torch, "sk": sk, "rnn": rnn, "T": 12, "B": 5, "m": 3})
    session = onnxruntime.InferenceSession(tmp_path / "rnn.onnx")
    x = torch.randn(30, 2, 3)
    out, h_n = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected, last = source(x)
    assert torch.allclose(torch.from_numpy(out), expected, rtol=0, atol=1e-5)
    assert torch.allclose(torch.from_numpy(h_n), last, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_what_was_exported_for_one_length_before_leaves_the_next_file_any(tmp_path):
    net = OrthogonalRNN(3, 4, batch_first=True)
    exported(net, tmp_path / "fixed.onnx", {0: BATCH})
    out, _ = exported(net, tmp_path / "any.onnx", {0: BATCH, 1: STEPS})(torch.randn(2, 7, 3))
    assert out.shape == (2, 7, 4)


@pytest.mark.slow
def test_a_complex_cell_runs_in_onnx_for_any_batch(tmp_path):
    cell = sk.nn.OrthogonalRNNCell(3, 4, field="complex")
    plain = sk.bake(copy.deepcopy(cell)).eval()
    arguments, dims = (torch.randn(5, 3),), ({0: BATCH},)
    torch.onnx.export(plain, arguments, tmp_path / "cell.onnx", dynamo=True, verbose=False, dynamic_shapes=dims)
    session = onnxruntime.InferenceSession(tmp_path / "cell.onnx")
    x = torch.randn(2, 3)
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(out), torch.view_as_real(cell(x)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("parametrization", [None, "cayley"])
def test_gates_that_drop_are_told_to_stop(parametrization):
    net = sk.bake(sk.models.create("lstm", 3, 4, 2, num_layers=2, dropout=0.5, parametrization=parametrization))
    with pytest.raises(torch.onnx.OnnxExporterError, match="training"):
        torch.onnx.export(net, (torch.randn(2, 3, 3),), dynamo=True, verbose=False)


@pytest.mark.slow
def test_a_kernel_that_is_baked_for_a_size_runs_in_onnx(tmp_path):
    layer = sk.nn.CayleyConv2d(4, 6, 3)
    run = exported(layer.baked(6, 5), tmp_path / "conv.onnx", {0: BATCH}, torch.randn(3, 4, 6, 5))
    x = torch.randn(2, 4, 6, 5)
    assert torch.allclose(run(x)[0], layer(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("axes", "size"), [("H, W", (6, 5)), ("W", (6,))])
def test_a_convolution_by_frequencies_is_told_to_be_baked_for_a_size(axes, size):
    layer = (sk.nn.CayleyConv1d if len(size) == 1 else sk.nn.CayleyConv2d)(4, 4, 3)
    with pytest.raises(torch.onnx.OnnxExporterError) as caught:
        torch.onnx.export(nn.Sequential(layer), (torch.randn(2, 4, *size),), dynamo=True, verbose=False)
    assert isinstance(caught.value.__cause__, errors.OptionError)
    needs = f"needs a kernel for images of one size, got {type(layer).__name__}; put layer.baked({axes}) in its place."
    assert needs in str(caught.value)


def test_a_net_with_maps_in_it_is_told_to_be_baked(tmp_path):
    with pytest.raises(torch.onnx.OnnxExporterError) as caught:
        torch.onnx.export(sk.orthogonal(nn.Linear(3, 3), "weight"), (torch.randn(2, 3),), dynamo=True, verbose=False)
    assert isinstance(caught.value.__cause__, errors.OptionError)
    assert "needs plain weights, got Linear.weight of a Cayley" in str(caught.value)
