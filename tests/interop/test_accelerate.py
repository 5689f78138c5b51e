"""accelerate, and other loaders that go key by key, fill orthogonal weights; what does not fit is refused."""

import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_file, save_model
from torch import nn

import stiefelkit as sk
from stiefelkit import errors

accelerate = pytest.importorskip("accelerate", reason="needs the extra [interop]")

INSIDE = "parametrizations.weight."


def net(name: str) -> Any:
    dtype = torch.complex64 if name == "fourier" else torch.float32
    layers = [sk.orthogonal(nn.Linear(4, 4, dtype=dtype), "weight", name) for _ in range(2)]
    return nn.Sequential(layers[0], nn.Linear(4, 4, dtype=dtype), nn.Sequential(layers[1]))


def x(model: Any) -> torch.Tensor:
    return torch.randn(3, 4, dtype=model[1].weight.dtype)


def hollow(name: str) -> Any:
    with accelerate.init_empty_weights():
        return net(name)


def filled(name: str, path: str) -> Any:
    """A hollow model after accelerate has put each tensor of a file in its place."""
    model = hollow(name)
    accelerate.load_checkpoint_in_model(model, path, device_map={"": "cpu"})
    return model


@pytest.fixture
def saved(tmp_path: Any) -> Any:
    def save(model: nn.Module, **changes: torch.Tensor) -> str:
        save_file({**model.state_dict(), **changes}, tmp_path / "model.safetensors", {"format": "pt"})
        return str(tmp_path / "model.safetensors")

    return save


over_maps = pytest.mark.parametrize("name", sorted(sk.available()))


@over_maps
@pytest.mark.parametrize("device_map", [{"": "cpu"}, "auto", {"0": "cpu", "1": "cpu", "2": "disk"}])
def test_a_hollow_model_is_loaded_and_dispatched(name: str, device_map: Any, saved: Any, tmp_path: Any) -> None:
    source, model = net(name), hollow(name)
    options = {"offload_folder": tmp_path / "off", "offload_buffers": True}
    loaded = accelerate.load_checkpoint_and_dispatch(model, saved(source), device_map=device_map, **options)
    for batch in (x(source), x(source)):
        assert torch.equal(loaded(batch), source(batch))
    if device_map == {"": "cpu"}:
        assert sk.drift(loaded).keys() == sk.drift(source).keys()
        assert list(loaded.state_dict()) == list(source.state_dict())
        assert not any("_extra_state" in key for key, _ in loaded.named_buffers())
        loaded(x(source)).abs().sum().backward()
        assert all(p.grad is not None for p in loaded.parameters())


@over_maps
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_weights_that_are_offloaded_are_brought_back_for_each_call(name: str, offload_buffers: bool) -> None:
    model = net(name)
    batch = x(model)
    expected = model(batch)
    offloaded = accelerate.cpu_offload(model, offload_buffers=offload_buffers)
    assert torch.equal(offloaded(batch), expected)
    assert torch.equal(offloaded(batch), expected)


@over_maps
def test_safetensors_saves_and_loads_models(name: str, tmp_path: Any) -> None:
    source, model = net(name), net(name)
    save_model(source, str(tmp_path / "model.safetensors"))
    load_model(model, tmp_path / "model.safetensors")
    batch = x(source)
    assert torch.equal(model(batch), source(batch))


def test_a_description_of_another_map_is_refused_at_the_next_read(saved: Any) -> None:
    key, other = f"0.{INSIDE}_extra_state", net("cayley").state_dict()
    text = bytes(other[key].tolist()).replace(b'"cayley"', b'"givens"').replace(b"cayley:Cayley", b"givens:Givens")
    path = saved(net("cayley"), **{key: torch.tensor(list(text), dtype=torch.uint8)})
    loaded = filled("cayley", path)
    for read in (lambda: loaded[0].weight, loaded.state_dict, lambda: copy.deepcopy(loaded)):
        with pytest.raises(errors.CheckpointError, match="map cayley"):
            read()
    loaded.load_state_dict(net("cayley").state_dict())
    assert list(sk.drift(loaded)) == ["0.weight", "2.0.weight"]


@pytest.mark.parametrize(
    ("change", "error"), [(lambda w: 2 * w, errors.CheckpointError), (lambda w: w * torch.nan, errors.NonFiniteError)]
)
def test_coordinates_that_are_no_frame_are_refused_at_the_next_read(change: Any, error: Any, saved: Any) -> None:
    source = net("stiefel")
    key = f"0.{INSIDE}original0"
    path = saved(source, **{key: change(source.state_dict()[key])})
    loaded = filled("stiefel", path)
    for read in (lambda: loaded(x(source)), loaded.state_dict, lambda: copy.deepcopy(loaded)):
        with pytest.raises(error):
            read()
    with pytest.raises(error):
        accelerate.load_checkpoint_and_dispatch(hollow("stiefel"), path, device_map={"": "cpu"})


def test_another_map_is_refused_while_it_is_loaded(saved: Any) -> None:
    model, path = hollow("cayley"), saved(net("householder"))
    with pytest.raises((ValueError, errors.CheckpointError)):
        accelerate.load_checkpoint_and_dispatch(model, path, device_map={"": "cpu"})


def test_a_model_of_transformers_is_saved_and_loaded(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra [interop]")

    class Config(transformers.PretrainedConfig):
        model_type = "stiefelkit-test"

    class Model(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layers = nn.ModuleList(
                [sk.orthogonal(nn.Linear(4, 4), "weight", name) for name in ("cayley", "stiefel", "givens")]
            )
            self.post_init()

        def _init_weights(self, module: Any) -> None: ...

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    source: Any = Model(Config())
    source.save_pretrained(tmp_path)
    batch = torch.randn(3, 4)
    for options in ({}, {"device_map": "cpu"}):
        loaded = Model.from_pretrained(tmp_path, **options)
        assert torch.equal(loaded(batch), source(batch))
        assert len(sk.drift(loaded)) == 3
