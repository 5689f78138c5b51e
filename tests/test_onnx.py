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

PAGE = Path(__file__).parent.parent / "docs" / "recurrence.md"
STEPS, BATCH = torch.export.Dim("steps"), torch.export.Dim("batch")


def exported(net: nn.Module, path: Path, dims: dict[int, Any]) -> Any:
    """Runs what was written from a baked copy of a net, on inputs of other sizes than those of the export."""
    plain = sk.bake(copy.deepcopy(net)).eval()
    arguments = (torch.randn(5, 3, 3),)
    torch.onnx.export(plain, arguments, path, dynamo=True, verbose=False, dynamic_shapes=(dims,))
    session = onnxruntime.InferenceSession(path)

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.from_numpy(out) for out in session.run(None, {session.get_inputs()[0].name: x.numpy()})]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scurnn", "goru", "henaff_rnn"])
def test_models_run_in_onnx_at_any_length(name, tmp_path):
    net: Any = sk.models.create(name, 3, 8, 2)
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


def test_a_net_with_maps_in_it_is_told_to_be_baked(tmp_path):
    with pytest.raises(torch.onnx.OnnxExporterError) as caught:
        torch.onnx.export(sk.orthogonal(nn.Linear(3, 3), "weight"), (torch.randn(2, 3),), dynamo=True, verbose=False)
    assert isinstance(caught.value.__cause__, errors.OptionError)
    assert "needs plain weights, got Linear.weight of a Cayley" in str(caught.value)
