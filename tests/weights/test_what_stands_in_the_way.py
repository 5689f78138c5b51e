"""Weights that are no plain parameters, and what torch puts on top of ours: it works, or a sentence says what does."""

import re
from typing import Any

import pytest
import torch
from every_map import make, over_all_maps
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import stiefelkit as sk
from stiefelkit import errors


def holder(kind) -> Any:
    layer: Any = nn.Linear(3, 3)
    if kind == "a buffer":
        del layer.weight
        layer.register_buffer("weight", torch.randn(3, 3))
    if kind == "a tensor":
        del layer.weight
        layer.weight = torch.randn(3, 3)
    return layer


def of_weight(w) -> Any:
    layer: Any = nn.Linear(3, 3)
    layer.weight = nn.Parameter(w)
    return layer


STANDING = {
    "a buffer": lambda: holder("a buffer"),
    "a tensor": lambda: holder("a tensor"),
    "weight_norm by hooks": lambda: torch.nn.utils.weight_norm(nn.Linear(3, 3)),
    "spectral_norm by hooks": lambda: torch.nn.utils.spectral_norm(nn.Linear(3, 3)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(3, 3), "weight", 2),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    "sparse": lambda: of_weight(torch.eye(3).to_sparse()),
    "ours": lambda: sk.orthogonal(nn.Linear(3, 3), "weight", "householder"),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
@pytest.mark.parametrize("kind", STANDING)
@pytest.mark.parametrize("path", ["", "0.", "inner."])
def test_the_remedy_that_is_printed_works(kind, path):
    layer = STANDING[kind]()
    model = layer if not path else nn.Sequential(layer) if path == "0." else nn.ModuleDict({"inner": layer})
    with pytest.raises(errors.OptionError, match="needs a plain parameter") as caught:
        sk.orthogonal(model, f"{path}weight")
    said = str(caught.value)
    assert "\n" not in said
    if kind == "ours":
        assert "sk.bake it first" in said
        sk.bake(model, f"{path}weight")
    else:
        (remedy,) = re.findall(r"; (.*?)(?: first| makes it one)\.$", said)
        exec(remedy, {"model": model, "torch": torch})
    assert isinstance(layer._parameters["weight"], nn.Parameter)
    sk.orthogonal(model, f"{path}weight")
    assert list(sk.drift(model)) == [f"{path}weight"]


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"max_norm": 0.5}, r"max_norm=0\.5, which scales rows"),
        ({"padding_idx": 0}, "padding_idx=0, whose row would be"),
        ({"sparse": True}, "sparse=True, though all rows"),
    ],
)
def test_an_embedding_that_writes_to_rows_or_leaves_one_out_is_refused_with_a_remedy_that_works(kind, option, said):
    model: Any = nn.Sequential(kind(5, 3, **option))
    nn.init.orthogonal_(model[0].weight)
    head = sk.orthogonal(nn.Linear(3, 5), "weight")
    for attempt in (
        lambda: sk.orthogonal(model, "0.weight", "stiefel"),
        lambda: sk.orthogonal(model, where="*"),
        lambda: sk.tie(head, "weight", model, "0.weight"),
        lambda: parametrize.register_parametrization(model[0], "weight", sk.parametrizations.Cayley((5, 3))),
        lambda: parametrize.transfer_parametrizations_and_params(head, model[0], "weight"),
    ):
        with pytest.raises(errors.OptionError, match=said) as caught:
            attempt()
        assert isinstance(model[0].weight, nn.Parameter)
        assert type(model[0]) is kind
    exec(re.findall(r"; (.*) first\.$", str(caught.value))[0], {"model": model[0]})
    sk.tie(head, "weight", model, "0.weight")
    parametrize.register_parametrization(sk.bake(model)[0], "weight", sk.parametrizations.StiefelPoint((5, 3)))


@pytest.mark.parametrize("kind", STANDING)
def test_torchs_own_functions_ask_what_orthogonal_asks_and_write_nothing(kind):
    layer, donor = STANDING[kind](), sk.orthogonal(nn.Linear(3, 3), "weight", "stiefel")
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    cls, weights = type(layer), layer.weight.to_dense()
    for attempt in (
        lambda: parametrize.register_parametrization(layer, "weight", sk.parametrizations.Cayley((3, 3)), unsafe=True),
        lambda: parametrize.transfer_parametrizations_and_params(donor, layer, "weight"),
    ):
        with pytest.raises((errors.OptionError, ValueError)):  # ValueError is torch's, where nothing stands registered
            attempt()
        assert type(layer) is cls
        assert torch.equal(layer.eval().weight.to_dense(), weights) or kind == "spectral_norm"
        assert all(torch.equal(value.to_dense(), layer.state_dict()[key].to_dense()) for key, value in before.items())


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_a_layer_that_keeps_a_list_of_its_weights_is_refused_by_torchs_own_functions_too(kind):
    rnn: Any = kind(3, 3)
    w, keys = rnn.weight_hh_l0, list(rnn.state_dict())
    nn.init.orthogonal_(w)
    for attempt in (
        lambda: parametrize.register_parametrization(rnn, "weight_hh_l0", sk.parametrizations.Cayley(tuple(w.shape))),
        lambda: sk.orthogonal(rnn, "weight_hh_l0"),
    ):
        with pytest.raises(errors.OptionError, match="weights"):
            attempt()
        assert rnn.weight_hh_l0 is w
        assert sorted(rnn.state_dict()) == sorted(keys)


def test_a_lazy_weight_is_asked_to_be_made_first():
    net: Any = nn.Sequential(nn.LazyLinear(4), nn.LazyConv1d(2, 3))
    chosen: Any
    for chosen in ({"name": "0.weight"}, {"where": "*.weight", "view": "out_by_rest"}):
        with pytest.raises(errors.OptionError, match="model"):
            sk.orthogonal(net, **chosen)
    net[0](torch.randn(2, 5))
    assert sk.orthogonal(net, "0.weight")[0].weight.shape == (4, 5)


def test_spectral_norm_goes_on_top_and_changes_nothing():
    layer: Any = sk.orthogonal(nn.Linear(4, 4), "weight", init="haar")
    w = layer.weight.detach()
    parametrizations.spectral_norm(layer)
    assert len(layer.parametrizations.weight) == 2
    assert torch.allclose(layer.weight, w, atol=1e-5)
    assert sk.drift(layer)["weight"].error < 1e-6


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
@pytest.mark.parametrize("put", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm])
def test_what_needs_a_plain_weight_leaves_ours_alone_and_takes_a_baked_one(put):
    layer: Any = sk.orthogonal(nn.Linear(4, 4), "weight")
    w, keys = layer.weight.detach(), list(layer.state_dict())
    with pytest.raises(KeyError, match=r"^'weight'$"):  # torch's own words, as over any parametrization
        put(layer)
    assert list(layer.state_dict()) == keys
    assert torch.equal(layer.weight, w)
    assert len(layer.parametrizations.weight) == 1
    put(sk.bake(layer))
    assert torch.allclose(layer(torch.eye(4)), w.mT + layer.bias, atol=1e-5)
    put(nn.Linear(4, 4))


def prune_globally(module, name):
    prune.global_unstructured([(module, name)], pruning_method=prune.L1Unstructured, amount=0.3)


BY_HOOKS = {
    "prune": lambda module, name: prune.l1_unstructured(module, name, amount=0.3),
    "global prune": prune_globally,
    "spectral_norm": torch.nn.utils.spectral_norm,
}


@pytest.mark.parametrize("tool", [*BY_HOOKS, "parametrizations"])
@over_all_maps
def test_what_parametrizes_a_tensor_is_refused_a_coordinate_and_leaves_it_as_it_was(tool, name, dtype):
    layer = make(name, dtype)
    held, w = layer.parametrizations.weight, layer.weight.detach().clone()
    before = [(key, id(p)) for key, p in layer.named_parameters()]  # which optimizers hold
    with pytest.raises(errors.OptionError, match="makes"):
        (parametrizations.spectral_norm if tool == "parametrizations" else BY_HOOKS[tool])(held, "original0")
    assert [(key, id(p)) for key, p in layer.named_parameters()] == before
    assert torch.equal(layer.weight, w)


@pytest.mark.parametrize("tool", ["prune", "global prune"])
@over_all_maps
def test_a_frame_is_not_pruned_and_a_baked_weight_is(tool, name, dtype):
    layer = make(name, dtype)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    with pytest.raises(TypeError):  # torch's
        BY_HOOKS[tool](layer, "weight")
    assert all(map(torch.equal, layer.state_dict().values(), before.values()))
    BY_HOOKS[tool](sk.bake(layer), "weight")
    assert (layer.weight == 0).any()


def test_another_parameter_in_the_place_of_a_coordinate_is_checked_before_it_is_read():
    for name in ("stiefel", "cayley"):
        layer = make(name, torch.float32)
        held, good = layer.parametrizations.weight, layer.weight.detach().clone()
        (coordinate,) = held.coordinates
        with pytest.raises(errors.OptionError, match="copy_ into it"):
            setattr(held, coordinate, nn.Parameter(held.original0.detach()))
        held.original0 = nn.Parameter(held.original0.detach().clone())
        assert torch.equal(layer.weight, good)
        for bad in (torch.zeros(3), torch.full_like(held.original0, torch.nan)):
            held.original0 = nn.Parameter(bad)
            with pytest.raises(
                (errors.CheckpointError, errors.NonFiniteError), match=rf"Linear\.weight \({coordinate}\)"
            ):
                layer(torch.ones(4))
    layer = make("stiefel", torch.float32)
    layer.parametrizations.weight.original0 = nn.Parameter(2 * torch.eye(4))
    with pytest.raises(errors.CheckpointError, match="orthonormal columns"):
        layer.state_dict()
    sk.reset_(layer, "weight")
    assert sk.drift(layer)["weight"].bits_lost < 1
