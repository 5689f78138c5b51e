"""A write into a weight that was read, which no other read sees, is warned of at the line that wrote."""

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import stiefelkit as sk
from stiefelkit.weights import outside_writes

MAPS = ["cayley", "householder", "givens", "matrix_exp", "stiefel", "hadamard", "margin", "block_diagonal"]


def layer_of(map_: str = "cayley", n: int = 8, p: int = 8) -> nn.Linear:
    return sk.orthogonal(nn.Linear(p, n), "weight", map_)


@torch.no_grad()
def _zero_a_row(w: Tensor) -> None:
    w[0] = 0


@torch.no_grad()
def _copy(w: Tensor) -> None:
    w.copy_(torch.zeros_like(w))


@pytest.mark.parametrize("write", [nn.init.orthogonal_, nn.init.xavier_uniform_, _zero_a_row, _copy])
@pytest.mark.parametrize("map_", MAPS)
def test_a_write_is_warned_of_where_it_was_done(map_: str, write: Callable[[Tensor], object]) -> None:
    layer = layer_of(map_)
    before = layer.weight.detach()
    for _ in range(2):  # the second read asks less
        with pytest.warns(UserWarning, match="computed") as seen:
            write(layer.weight)
        assert [warning.filename for warning in seen] == [__file__]
    assert torch.equal(layer.weight, before)


def test_a_write_into_a_weight_of_a_group_is_warned_of_and_no_other_read_sees_it() -> None:
    layers = layer_of(), layer_of()
    with sk.grouped(nn.Sequential(*layers)):
        before = [layer.weight.detach().clone() for layer in layers]
        nn.init.zeros_(layers[0].weight)
        with pytest.warns(UserWarning, match="computed"):
            after = [layer.weight.detach().clone() for layer in layers]
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("map_", MAPS)
def test_what_training_copies_and_tools_do_is_not_warned_of(map_: str) -> None:
    layer = layer_of(map_)
    make = sk.optim.CayleySGD if map_ == "stiefel" else torch.optim.SGD
    optimizer = make(sk.optim.parameter_groups(layer, lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            held = layer.weight  # while the step writes the coordinates
            optimizer.zero_grad()
            (layer(torch.ones(2, 8)).square().sum() + held.sum()).backward()
            optimizer.step()
        copy.deepcopy(layer)
        pickle.dumps(layer)
        layer.load_state_dict(layer.state_dict())
        layer.reset_parameters()
        layer.weight.detach().clone().mul_(2)
        sk.assign_(layer, "weight", layer.weight.detach())
        torch.vmap(layer)(torch.ones(3, 8))
        torch.save(layer.weight, io.BytesIO())
        with torch.inference_mode():
            layer.weight.mul_(2)  # torch counts no writes there
        sk.bake(layer)
    assert layer.weight.isfinite().all()


def test_a_weight_that_is_gone_leaves_nothing_behind() -> None:
    gc.collect()
    before = len(outside_writes.reads)
    layer = layer_of()
    w = layer.weight
    loss = (w @ w).sum()
    del w
    assert len(outside_writes.reads) == before + 1  # the graph has it
    loss.backward()
    del loss
    assert len(outside_writes.reads) == before


def test_graphs_hold_nothing_of_it() -> None:
    layer = layer_of().requires_grad_(False)
    traced = make_fx(lambda x: layer(x))(torch.ones(8))
    assert torch.ops.aten.detach.default not in [node.target for node in traced.graph.nodes]


def _without_gradient(module: nn.Module, args: tuple[Tensor, ...], w: Tensor) -> None:
    w.register_hook(torch.zeros_like)


@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_forward_hook_of_what_computes_a_weight_sees_every_read(is_grouped: bool) -> None:
    layers = layer_of(), layer_of()
    model = nn.Sequential(*layers)
    if is_grouped:
        sk.group_(model)
    lists = [layer.get_submodule("parametrizations.weight") for layer in layers]
    lists[0].register_forward_hook(_without_gradient)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
        of_first, of_second = ([c.grad for c in one.parameters()] for one in lists)
        assert not any(g is None or g.any() for g in of_first)
        assert all(g is not None and g.any() for g in of_second)
