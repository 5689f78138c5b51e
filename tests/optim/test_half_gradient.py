"""gradient="half": the half of dL/dW that the code of Wisdom et al. follows, from a free real 2n x 2n matrix."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors, init
from stiefelkit.nn import OrthogonalRNN, OrthogonalRNNCell
from stiefelkit.scan import scan
from stiefelkit.testing import seeds
from stiefelkit.testing.cases import saved_and_loaded

DOUBLE, N = torch.float64, 6
FRAME = "rnn.parametrizations.weight_hh_l0.original0"


def make() -> Any:
    return sk.models.create("full_urnn", 2, N, 3).double()


def frame_of(net) -> Any:
    return net.rnn.parametrizations.weight_hh_l0.stiefel


def optimizer_of(net, gradient, **settings):
    return sk.optim.MultiplicativeCayley(sk.optim.parameter_groups(net, lr=1e-2), gradient=gradient, **settings)


def inputs():
    return torch.randn(4, 7, 2, dtype=DOUBLE, generator=seeds.generator(3))


def loss_of(net):
    return net(inputs()).square().sum()


def gradients(net):
    net.zero_grad()
    loss_of(net).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def blocks(net):
    """Loss of the net on rows [Re h | Im h], whose 2n x 2n matrix is free, and the gradient of its four blocks."""
    rnn = net.rnn
    wt = rnn.weight_hh_l0.detach().mT
    block = torch.cat([torch.cat([wt.real, wt.imag], 1), torch.cat([-wt.imag, wt.real], 1)]).requires_grad_()
    h, outputs = rnn.h0_l0.expand(4, -1), []
    for x in inputs().unbind(1):
        z = x @ rnn.weight_ih_l0.mT + h @ block
        modulus = (z[:, :N].square() + z[:, N:].square()).sqrt()
        h = z * (torch.relu(modulus + rnn.bias_l0) / modulus).repeat(1, 2)
        outputs.append(net.output(h))
    loss = torch.stack(outputs, 1).square().sum()
    return loss, torch.autograd.grad(loss, block)[0]


def half(g):
    """What the first block row alone says of dL/dW."""
    return torch.complex(g[:N, :N], g[:N, N:]).mT


def whole(g):
    return torch.complex(g[:N, :N] + g[N:, N:], g[:N, N:] - g[N:, :N]).mT


def cosine(a, b):
    return ((a.conj() * b).real.sum() / a.norm() / b.norm()).item()


def test_it_is_the_first_block_row_of_a_free_real_matrix_and_all_else_is_exact():
    net = make()
    loss, g = blocks(net)
    assert torch.allclose(loss_of(net), loss)
    exact = gradients(net)
    optimizer_of(net, "half")
    reference = gradients(net)
    assert torch.allclose(exact.pop(FRAME), whole(g), atol=1e-12)
    assert torch.allclose(reference.pop(FRAME), half(g), atol=1e-12)
    assert 0.3 < cosine(half(g), whole(g)) < 0.99
    assert all(torch.equal(exact[key], reference[key]) for key in exact)


def test_the_step_is_the_cayley_transform_along_it():
    net = make()
    w, g = frame_of(net).detach().clone(), half(blocks(net)[1])
    optimizer = optimizer_of(net, "half")
    gradients(net)
    optimizer.step()
    b, eye = g @ w.mH - w @ g.mH, torch.eye(N, dtype=w.dtype)
    expected = torch.linalg.solve(eye + 0.005 * b, (eye - 0.005 * b) @ w)
    assert torch.allclose(frame_of(net), expected, atol=1e-12)


def test_another_optimizer_of_the_frame_has_the_exact_gradient_again():
    net = make()
    exact = gradients(net)
    for again in (
        lambda: optimizer_of(net, "exact"),
        lambda: sk.optim.CayleySGD(sk.optim.parameter_groups(net, lr=1e-2)),
        lambda: sk.optim.geoopt_parameters(net),
    ):
        optimizer_of(net, "half")
        assert not all(torch.equal(g, exact[key]) for key, g in gradients(net).items())
        again()
        assert all(torch.equal(g, exact[key]) for key, g in gradients(net).items())


def test_copies_keep_to_it():
    net = make()
    optimizer_of(net, "half")
    expected = gradients(net)
    for twin in (copy.deepcopy(net), saved_and_loaded(net, False), copy.deepcopy(nn.Sequential(net))[0]):
        found = gradients(twin)
        assert all(torch.equal(found[key], g) for key, g in expected.items())


def test_a_run_is_resumed_with_it():
    net = make()
    optimizer = optimizer_of(net, "half", precondition="rmsprop")
    gradients(net)
    optimizer.step()
    other = make()
    other.load_state_dict(net.state_dict())
    twin = optimizer_of(other, "exact", precondition="rmsprop")
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        for n, o in ((net, optimizer), (other, twin)):
            gradients(n)
            o.step()
    assert torch.equal(frame_of(net), frame_of(other))
    twin.load_state_dict(optimizer_of(make(), "exact").state_dict())
    assert torch.allclose(gradients(other)[FRAME], whole(blocks(other)[1]))


def test_layers_directions_and_cells_have_it():
    rnn: Any = OrthogonalRNN(2, N, 2, field="complex", bidirectional=True, parametrization="stiefel", dtype=DOUBLE)
    cell: Any = OrthogonalRNNCell(2, N, field="complex", parametrization="stiefel", dtype=DOUBLE)
    x = inputs()
    h = torch.randn(7, N, dtype=torch.complex128)
    found = {}
    for gradient in ("exact", "half"):
        optimizer_of(nn.ModuleList([rnn, cell]), gradient)
        value = rnn(x)[0].abs().square().sum() + cell(x[0], h).abs().square().sum()
        found[gradient] = torch.autograd.grad(value, [p for p in (*rnn.parameters(), *cell.parameters())])
    for p, exact, reference in zip((*rnn.parameters(), *cell.parameters()), *found.values(), strict=True):
        assert torch.equal(exact, reference) is not p.is_complex()


@pytest.mark.parametrize(
    ("net", "text"),
    [
        (lambda: OrthogonalRNN(2, 4, parametrization="stiefel"), r"OrthogonalRNN\.weight_hh_l0 \(torch\.float32\)"),
        (lambda: sk.nn.OrthogonalLinear(4, 4, parametrization="stiefel", dtype=torch.complex64), "OrthogonalLinear"),
        (lambda: OrthogonalRNN(2, 4, field="complex", parametrization="margin", u="stiefel"), "weight_hh_l0"),
    ],
    ids=["real", "not recurrent", "one coordinate of several"],
)
def test_a_frame_that_cannot_have_it_is_refused_in_one_sentence(net, text):
    module = net()
    with pytest.raises(errors.OptimizerError, match=text) as caught:
        optimizer_of(module, "half")
    assert str(caught.value).count(". ") == 0
    optimizer = optimizer_of(module, "exact")
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["gradient"] = "half"
    with pytest.raises(errors.OptimizerError, match=text):
        optimizer.load_state_dict(state)


def test_a_frame_of_no_module_is_refused_and_nets_without_frames_are_not():
    w = nn.Parameter(init.haar((4, 4), torch.complex128))
    groups = [{"params": [w], "manifold": "stiefel:canonical"}]
    with pytest.raises(errors.OptimizerError, match="no module"):
        sk.optim.MultiplicativeCayley(groups, gradient="half")
    optimizer_of(sk.models.create("scurnn", 2, 4, 3), "half")


def test_the_scan_differentiates_it_once_and_says_so():
    x, h0 = torch.randn(3, 2, 4, dtype=torch.complex128), torch.randn(2, 4, dtype=torch.complex128)
    w = init.haar((4, 4), torch.complex128).requires_grad_()

    def loss(w, gradient="half"):
        return scan(x, w, h0, activation="modrelu", gradient=gradient)[1].abs().square().sum()

    (g,) = torch.autograd.grad(loss(w), w, create_graph=True)
    batched = torch.func.vmap(torch.func.grad(loss))(torch.stack([w, w]))
    assert torch.allclose(batched, g.expand(2, 4, 4))
    with pytest.raises(errors.OptionError, match="second derivatives"):
        g.abs().sum().backward()
    with pytest.raises(errors.OptionError, match="second derivatives"):
        torch.func.grad(lambda w: torch.func.grad(loss)(w).abs().sum())(w)
    with pytest.raises(errors.OptionError, match='did you mean "half"'):
        loss(w, "hal")
    with pytest.raises(errors.DtypeError, match="complex w"):
        scan(x.real, w.detach().real, h0.real, gradient="half")


def test_a_state_dict_that_calls_the_half_gradient_reference_loads():
    net = sk.models.create("full_urnn", 2, 4, 3)
    saved = optimizer_of(net, "half").state_dict()
    for group in saved["param_groups"]:
        group["gradient"] = "reference"
    optimizer = optimizer_of(net, "exact")
    optimizer.load_state_dict(saved)
    assert {group["gradient"] for group in optimizer.param_groups} == {"half"}
    assert {group["gradient"] for group in saved["param_groups"]} == {"reference"}
