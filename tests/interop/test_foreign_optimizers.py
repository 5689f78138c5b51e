"""Optimizers, averages and loops of other libraries: flat coordinates take all of them, a frame none but its own."""

from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.testing import seeds

FLAT = ("cayley", "householder", "givens", "matrix_exp")
X = torch.randn(32, 6, generator=seeds.generator(1))
Y = torch.randn(32, 4, generator=seeds.generator(2))


def net(name: str) -> Any:
    torch.manual_seed(seeds.seed(3))
    first, last = (sk.orthogonal(nn.Linear(6, n), "weight", name) for n in (6, 4))
    return nn.Sequential(first, nn.Tanh(), last)


def backward(model, optimizer):
    optimizer.zero_grad()
    loss = (model(X) - Y).square().mean()
    loss.backward()
    return loss


def stepped(model, optimizer, count):
    for _ in range(count):
        backward(model, optimizer)
        optimizer.step()


def are_frames(model):
    return all(drift.error <= 2 * drift.limit + 1.2e-7 for drift in sk.drift(model).values())


def weights(model):
    return [model[0].weight.detach().clone(), model[2].weight.detach().clone()]


def of_pytorch_optimizer():
    library = pytest.importorskip("pytorch_optimizer", reason="needs the extra [interop]")
    for name in ("adamp", "lamb", "lars", "nero", "fromage", "soap", "lion", "adopt", "schedulefreesgd", "shampoo"):
        yield library.load_optimizer(name)


def of_torch_optimizer():
    library = pytest.importorskip("torch_optimizer", reason="needs the extra [interop]")
    yield from (library.AdaBound, library.DiffGrad, library.NovoGrad, library.Yogi)


def of_the_rest():
    yield pytest.importorskip("lion_pytorch", reason="needs the extra [interop]").Lion
    yield pytest.importorskip("prodigyopt", reason="needs the extra [interop]").Prodigy


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [of_pytorch_optimizer, of_torch_optimizer, of_the_rest])
def test_flat_coordinates_take_any_optimizer_and_a_frame_none(family):
    for kind in family():
        for name in FLAT:
            model = net(name)
            optimizer, before = kind(model.parameters(), lr=1e-2), weights(model)
            stepped(model, optimizer, 3)
            assert are_frames(model)
            assert all(not torch.equal(old, new) for old, new in zip(before, weights(model), strict=True))
        model = net("stiefel")
        optimizer, before = kind(model.parameters(), lr=1e-2), weights(model)
        backward(model, optimizer)
        with pytest.raises(errors.OptimizerError, match="may move freely"):
            optimizer.step()
        assert all(map(torch.equal, before, weights(model)))


def test_a_wrapper_with_hooks_of_torch_is_refused_around_an_optimizer_of_frames():
    library = pytest.importorskip("pytorch_optimizer", reason="needs the extra [interop]")
    model = net("stiefel")
    wrapper = library.Lookahead(sk.optim.CayleySGD(sk.optim.parameter_groups(model, lr=0.1)))
    backward(model, wrapper)
    with pytest.raises(errors.OptimizerError, match="Lookahead needs parameters that may move freely"):
        wrapper.step()


def test_ten_steps_after_lookahead_without_hooks_all_are_frames():
    library = pytest.importorskip("torch_optimizer", reason="needs the extra [interop]")
    model = net("stiefel")
    optimizer = sk.optim.CayleySGD(sk.optim.parameter_groups(model, lr=0.1))
    wrapper = library.Lookahead(optimizer, k=2)
    for each in [wrapper] * 6 + [optimizer] * 10:
        backward(model, optimizer)
        each.step()
    assert are_frames(model)


def test_schedule_free_averages_flat_coordinates_and_is_warned_of_around_an_optimizer_of_frames():
    library = pytest.importorskip("schedulefree", reason="needs the extra [interop]")
    model = net("cayley")
    optimizer = library.SGDScheduleFree(model.parameters(), lr=0.1)
    optimizer.train()
    stepped(model, optimizer, 4)
    trained = weights(model)
    optimizer.eval()
    assert are_frames(model)
    assert not torch.equal(trained[0], model[0].weight)
    optimizer.train()
    torch.testing.assert_close(model[0].weight.detach(), trained[0])

    model = net("stiefel")
    wrapper = library.ScheduleFreeWrapper(sk.optim.CayleySGD(sk.optim.parameter_groups(model, lr=0.5)))
    wrapper.train()
    with pytest.warns(UserWarning, match="by itself"):
        stepped(model, wrapper, 6)


@pytest.mark.parametrize("name", ["cayley", "stiefel"])
def test_an_average_of_torch_ema_is_of_frames_and_training_goes_on_from_it(name):
    library = pytest.importorskip("torch_ema", reason="needs the extra [interop]")
    model = net(name)
    kind = sk.optim.CayleySGD if name == "stiefel" else torch.optim.SGD
    optimizer = kind(sk.optim.parameter_groups(model, lr=0.5))
    average = library.ExponentialMovingAverage(model.parameters(), decay=0.8)
    for _ in range(6):
        backward(model, optimizer)
        optimizer.step()
        average.update()
    model.eval()
    trained = weights(model)
    with average.average_parameters():
        of_average = weights(model)
    assert all(map(torch.equal, trained, weights(model)))
    for w in of_average:
        w = w if w.shape[0] >= w.shape[1] else w.mT
        assert sk.metrics.orthogonality_error(w).item() < 1e-6
    model.train()
    average.copy_to()
    backward(model, optimizer)
    optimizer.step()
    assert are_frames(model)


@pytest.mark.parametrize("name", ["householder", "stiefel"])
def test_checkpoints_and_the_finder_of_rates_of_ignite_restore_every_bit(name, tmp_path):
    handlers = pytest.importorskip("ignite.handlers", reason="needs the extra [interop]")
    engine = pytest.importorskip("ignite.engine")
    kind = sk.optim.CayleyAdam if name == "stiefel" else torch.optim.Adam

    def made():
        model = net(name)
        return model, kind(sk.optim.parameter_groups(model, lr=0.05))

    def trainer(model, optimizer):
        def update(engine, batch):
            model.train()
            loss = backward(model, optimizer)
            optimizer.step()
            return loss.item()

        return engine.Engine(update)

    model, optimizer = made()
    first = trainer(model, optimizer)
    average = handlers.EMAHandler(model, momentum=0.2)
    average.attach(first, event=engine.Events.ITERATION_COMPLETED)
    saved = handlers.Checkpoint({"model": model, "optimizer": optimizer}, handlers.DiskSaver(str(tmp_path)))
    first.add_event_handler(engine.Events.EPOCH_COMPLETED, saved)
    first.run(range(5), max_epochs=1)
    average.ema_model.eval()(X)
    assert are_frames(average.ema_model)

    other, its_optimizer = made()
    file = next(tmp_path.glob("*.pt"))
    handlers.Checkpoint.load_objects({"model": other, "optimizer": its_optimizer}, torch.load(file))
    before = weights(other)
    assert all(map(torch.equal, before, weights(model)))
    finder = handlers.FastaiLRFinder()
    with finder.attach(
        trainer(other, its_optimizer), {"model": other, "optimizer": its_optimizer}, num_iter=4
    ) as found:
        found.run(range(4))
    assert all(map(torch.equal, before, weights(other)))


def test_fused_backward_passes_of_lomo_are_warned_of_on_frames():
    library = pytest.importorskip("pytorch_optimizer", reason="needs the extra [interop]")
    for name in ("cayley", "stiefel"):
        model = net(name)
        optimizer, before = library.LOMO(model, lr=0.1), weights(model)

        def steps(model=model, optimizer=optimizer):
            for _ in range(6):
                optimizer.fused_backward((model(X) - Y).square().mean(), lr=0.1)

        if name == "cayley":
            steps()
            assert are_frames(model)
            assert not torch.equal(before[0], model[0].weight)
        else:
            with pytest.warns(UserWarning, match="by itself"):
                steps()


def test_skorch_takes_groups_of_frames_and_goes_on_from_its_files(tmp_path):
    skorch = pytest.importorskip("skorch", reason="needs the extra [interop]")

    class OnFrames(skorch.NeuralNetRegressor):
        def get_params_for_optimizer(self, prefix, named_parameters):
            _, settings = super().get_params_for_optimizer(prefix, named_parameters)
            return (sk.optim.parameter_groups(self.module_, lr=self.lr),), settings

    options = {"module": net("stiefel"), "lr": 0.05, "max_epochs": 2, "verbose": 0, "train_split": None}
    plain = skorch.NeuralNetRegressor(optimizer=torch.optim.SGD, **options)
    with pytest.raises(errors.OptimizerError, match="may move freely"):
        plain.fit(X.numpy(), Y.numpy())
    options["module"] = net("stiefel")
    first = OnFrames(optimizer=sk.optim.CayleyAdam, **options).fit(X.numpy(), Y.numpy())
    assert are_frames(first.module_)
    files = {"f_params": str(tmp_path / "module.pt"), "f_optimizer": str(tmp_path / "optimizer.pt")}
    first.save_params(**files)
    options["module"] = net("stiefel")
    second = OnFrames(optimizer=sk.optim.CayleyAdam, **options).initialize()
    second.load_params(**files)
    for each in (first, second):
        each.partial_fit(X.numpy(), Y.numpy())
    assert (first.predict(X.numpy()) == second.predict(X.numpy())).all()


def test_fastai_is_refused_on_frames_but_by_its_wrapper_of_an_optimizer_of_frames(tmp_path):
    basics = pytest.importorskip("fastai.basics", reason="needs fastai")
    pytest.importorskip("fastai.callback.progress")

    def learner(model, **options):
        loaders = basics.DataLoaders(*[basics.DataLoader([*zip(X, Y, strict=True)], bs=8) for _ in range(2)])
        return basics.Learner(loaders, model, loss_func=nn.MSELoss(), path=tmp_path, **options)

    def fit(one):
        with one.no_bar(), one.no_logging():
            one.fit(2, 1e-2)

    model = net("cayley")
    before = weights(model)
    fit(learner(model))
    assert are_frames(model)
    assert not torch.equal(before[0], model[0].weight)
    with pytest.warns(UserWarning, match="by itself"):
        fit(learner(net("stiefel")))

    model = net("stiefel")

    def wrapped(params, lr):
        return basics.OptimWrapper(opt=sk.optim.CayleyAdam(sk.optim.parameter_groups(model, lr=lr)))

    before = weights(model)
    one = learner(model, opt_func=wrapped)
    fit(one)
    assert are_frames(model)
    assert not torch.equal(before[0], model[0].weight)
    one.save("now")
    kept = weights(model)
    fit(one)
    one.load("now")
    assert all(map(torch.equal, kept, weights(model)))
