"""lightning swaps averaged weights in through `.data`: it validates, saves and ends with frames."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import stiefelkit as sk
from stiefelkit.metrics import orthogonality_error, permitted_error
from stiefelkit.testing import seeds

lightning = pytest.importorskip("lightning", reason="needs the extra [interop]")
callbacks: Any = pytest.importorskip("lightning.pytorch.callbacks", reason="needs the extra [interop]")

AVERAGES = {
    "EMA": lambda: callbacks.EMAWeightAveraging(decay=0.9),
    "long EMA": lambda: callbacks.EMAWeightAveraging(decay=0.9999),
    "mean": lambda: callbacks.WeightAveraging(),
}


def module(name) -> Any:
    """A lightning module of one layer that keeps what errors validation has seen."""

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(seeds.seed(4))
            self.dtype_of = torch.complex64 if name == "fourier" else torch.float32
            self.layer = sk.orthogonal(nn.Linear(12, 12, dtype=self.dtype_of), "weight", name)
            self.seen = []

        def training_step(self, batch, index):
            return (self.layer(batch.to(self.dtype_of)) - 1).abs().square().mean()

        def validation_step(self, batch, index):
            self.seen.append(orthogonality_error(self.layer.weight).item())

        def configure_optimizers(self):
            kind = sk.optim.CayleySGD if name == "stiefel" else torch.optim.SGD
            return kind(sk.optim.parameter_groups(self, lr=0.3))

    return Module()


def fit(model, *used, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = DataLoader(torch.randn(16, 12, generator=seeds.generator(5)), batch_size=4)  # type: ignore[arg-type]
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer = lightning.Trainer(max_epochs=2, callbacks=list(used), **quiet, **options)
        trainer.fit(model, data, data)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("name", ["stiefel", "rebased", "cayley", "fourier"])
def test_averaged_weights_are_frames_in_validation_checkpoints_and_at_the_end(name, average, tmp_path):
    model = module(name)
    fit(model, AVERAGES[average](), callbacks.ModelCheckpoint(dirpath=tmp_path, save_last=True))
    limit = permitted_error(12, torch.float32)
    assert max(model.seen) <= limit
    assert orthogonality_error(model.layer.weight).item() <= limit
    saved = torch.load(tmp_path / "last.ckpt")
    for state in (saved["state_dict"], saved["current_model_state"], model.state_dict()):
        fresh = module(name)
        fresh.load_state_dict(state)
        assert orthogonality_error(fresh.layer.weight).item() <= limit
