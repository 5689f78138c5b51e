"""State dicts, copies, devices and dtypes of orthogonal weights."""

import copy
import multiprocessing
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrize

import stiefelkit as sk
from stiefelkit import errors


def make(rows=5, columns=3, **options):
    return sk.orthogonal(nn.Linear(columns, rows), "weight", "cayley", **options)


def test_keys_are_torchs_and_one_entry_names_the_map():
    keys = set(make().state_dict())
    inside = "parametrizations.weight."
    assert keys == {"bias", inside + "original0", inside + "0.signs", inside + "_extra_state"}


def test_safetensors_bring_back_the_same_bits(tmp_path):
    layer, other = make(), make()
    save_file(layer.state_dict(), tmp_path / "w.safetensors")
    other.load_state_dict(load_file(tmp_path / "w.safetensors"))
    assert torch.equal(other.weight, layer.weight)


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (lambda s: s.update({"parametrizations.weight.original0": torch.zeros(5)}), errors.CheckpointError, "(9,)"),
        (lambda s: s["parametrizations.weight.original0"].fill_(torch.inf), errors.NonFiniteError, "NaN or infinity"),
        (lambda s: s.pop("parametrizations.weight._extra_state"), errors.CheckpointError, "names its map"),
        (lambda s: s.pop("parametrizations.weight.0.signs"), errors.CheckpointError, "signs"),
        (lambda s: s.update(weight=torch.zeros(5, 3)), errors.CheckpointError, "plain weight"),
        (
            lambda s: s.update({"parametrizations.weight._extra_state": torch.zeros(3, dtype=torch.uint8)}),
            errors.CheckpointError,
            "unreadable",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_written(spoil, error, text):
    layer = make()
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    state = {key: value.clone() for key, value in make().state_dict().items()}
    spoil(state)
    for load in (sk.check_state_dict, lambda module, s: module.load_state_dict(s)):
        with pytest.raises(error) as caught:
            load(layer, state)
        assert text in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


def test_a_checkpoint_of_another_shape_or_field_is_refused():
    layer = make(4, 4)
    with pytest.raises(errors.CheckpointError, match="shape"):
        layer.load_state_dict(make(5, 4).state_dict())
    complex_layer = sk.orthogonal(nn.Linear(4, 4, dtype=torch.complex64), "weight", "cayley")
    with pytest.raises(errors.CheckpointError, match="field"):
        layer.load_state_dict(complex_layer.state_dict())


def test_a_partial_state_dict_without_the_weight_loads_when_not_strict():
    layer = make()
    w = layer.weight.detach().clone()
    layer.load_state_dict({"bias": torch.ones(5)}, strict=False)
    assert torch.equal(layer.weight, w)
    assert torch.equal(layer.bias, torch.ones(5))


def test_a_plain_checkpoint_of_a_whole_model_is_refused_by_name():
    net = nn.Sequential(nn.ReLU(), make())
    with pytest.raises(errors.CheckpointError, match=r"1\.weight"):
        sk.check_state_dict(net, nn.Sequential(nn.ReLU(), nn.Linear(3, 5)).state_dict())


def test_dtype_of_the_weight_follows_the_user_and_coordinates_stay_at_float32():
    layer = make()
    layer.bfloat16()
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert sk.coordinates(layer, "weight")["skew"].dtype == torch.float32
    layer.float()
    assert layer.weight.dtype == torch.float32
    layer.double()
    assert layer.weight.dtype == sk.coordinates(layer, "weight")["skew"].dtype == torch.float64


def test_a_round_trip_through_half_keeps_every_bit():
    layer = make()
    w = layer.weight.detach().clone()
    assert torch.equal(layer.half().float().weight, w)


def test_views_follow_dtypes_too():
    layer = make(3, 5).to(torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    assert sk.drift(layer)["weight"].limit > 1e-3


def test_a_real_weight_cannot_become_complex():
    with pytest.raises(errors.DtypeError, match="field"):
        make().to(torch.complex64)


def test_meta_weights_fill_by_reset_or_load():
    with torch.device("meta"):
        layer = make()
    with pytest.raises(errors.UnfilledError):
        layer.weight  # noqa: B018
    with pytest.raises(errors.OptionError, match="meta"):
        sk.reset_(layer, "weight")
    layer.to_empty(device="cpu")
    with pytest.raises(errors.UnfilledError):
        layer(torch.ones(3))
    sk.reset_(layer, "weight")
    assert sk.drift(layer)["weight"].error < 1e-6
    with torch.device("meta"):
        other = make()
    other.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(other.weight, layer.weight)


def test_moving_between_real_devices_does_not_empty():
    layer = make().to("cpu").cpu()
    layer.share_memory()
    assert torch.isfinite(layer.weight).all()


def test_pickling_keeps_subclasses_and_further_parametrizations(tmp_path):
    layer = make(4, 4)
    parametrize.register_parametrization(layer, "bias", nn.Tanh(), unsafe=True)
    torch.save(layer, tmp_path / "layer.pt")
    loaded = torch.load(tmp_path / "layer.pt", weights_only=False)
    assert torch.equal(loaded.weight, layer.weight)
    assert torch.equal(loaded.bias, layer.bias)
    assert isinstance(loaded, nn.Linear)


def read_weight(layer, queue):
    queue.put(layer.weight.detach().numpy())


def test_spawned_processes_receive_the_weight():
    layer = make(3, 3)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=read_weight, args=(layer, queue))
    process.start()
    received = queue.get(timeout=120)
    process.join()
    assert (received == layer.weight.detach().numpy()).all()


def test_a_deepcopy_has_a_class_of_its_own_and_trains_alone():
    layer = make(4, 4)
    twin = copy.deepcopy(layer)
    assert type(twin) is not type(layer)
    optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
    twin(torch.ones(4)).sum().backward()
    optimizer.step()
    assert not torch.equal(twin.weight, layer.weight)
    assert sk.coordinates(layer, "weight")["skew"].grad is None


def test_torch_still_has_the_private_names_that_the_carrier_uses():
    for name in ("_inject_new_class", "_inject_property"):
        assert hasattr(parametrize, name), f"torch renamed parametrize.{name}: mend stiefelkit/carrier.py"


def test_a_further_parametrization_composes_on_top():
    class Scale(nn.Module):
        def forward(self, w):
            return 2 * w

        def right_inverse(self, w):
            return w / 2

    layer = make(4, 4)
    parametrize.register_parametrization(layer, "weight", Scale())
    assert torch.allclose(layer.weight.mT @ layer.weight, 4 * torch.eye(4), atol=1e-5)
    layer.weight = 2 * torch.eye(4)
    assert torch.allclose(layer.weight, 2 * torch.eye(4), atol=1e-6)
    assert sk.drift(layer)["weight"].error < 1e-6


def test_compiled_training_equals_eager_training():
    def train(compiled) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(make(6, 6), nn.Tanh(), make(2, 6))
        run = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        for _ in range(5):
            optimizer.zero_grad()
            run(torch.ones(3, 6)).square().sum().backward()
            optimizer.step()
        return net[0].weight

    assert torch.allclose(train(True), train(False), atol=1e-5)
