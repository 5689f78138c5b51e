"""Libraries of models (timm, diffusers, the mixin of huggingface_hub): nets with orthogonal weights in their hands."""

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.testing import seeds

hub = pytest.importorskip("huggingface_hub", reason="needs the extra [interop]")
safe = pytest.importorskip("safetensors.torch")
NAMES = ["cayley", "householder", "givens", "matrix_exp", "stiefel"]
UNET: dict[str, Any] = {
    "sample_size": 8,
    "layers_per_block": 1,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 8,
    "attention_head_dim": 4,
    "in_channels": 3,
    "out_channels": 3,
}


def trained(net: Any, name: str, loss: Any, after: Any) -> None:
    """Takes some steps, of frames along their manifold."""
    kind: Any = sk.optim.StiefelAdam if name == "stiefel" else torch.optim.Adam
    optimizer = kind(sk.optim.parameter_groups(net, lr=1e-2))
    for _ in range(3):
        optimizer.zero_grad()
        loss(net).backward()
        optimizer.step()
        after()


def worst(net: nn.Module) -> float:
    return max(drift.bits_lost for drift in sk.drift(net).values())


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("name", NAMES)
def test_a_net_on_a_hub_comes_back_with_its_weights_and_ties(name: str, tied: bool, tmp_path: Path):
    class Net(nn.Module, hub.PyTorchModelHubMixin):
        def __init__(self, name: str, tied: bool):
            super().__init__()
            self.embed, self.turn, self.read = nn.Embedding(12, 6), nn.Linear(6, 6), nn.Linear(6, 12, bias=False)
            sk.orthogonal(self, ["embed.weight", "turn.weight", "read.weight"], name, init="haar")
            if tied:
                sk.tie(self, "embed.weight", self.read, "weight")

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.read(self.turn(self.embed(tokens)))

    net: Any = Net(name, tied)
    net.save_pretrained(tmp_path)
    loaded = Net.from_pretrained(tmp_path)
    tokens = torch.arange(12)
    assert torch.equal(loaded(tokens), net(tokens))
    assert (loaded.embed.parametrizations.weight is loaded.read.parametrizations.weight) is tied
    safe.save_model(net, str(tmp_path / "net.safetensors"))
    for other in {*NAMES} - {name}:
        with pytest.raises(errors.CheckpointError, match="map"):
            safe.load_model(Net(other, tied), str(tmp_path / "net.safetensors"))


@pytest.fixture(scope="module")
def timm() -> Any:
    return pytest.importorskip("timm", reason="needs timm, which no extra brings")


def transformer(timm: Any, name: str) -> Any:
    net = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=8, depth=2, num_heads=2)
    sk.orthogonal(net, "blocks.*.attn.qkv.weight", name, blocks=3)
    return sk.orthogonal(net, ["blocks.*.attn.proj.weight", "blocks.*.mlp.fc1.weight"], name)


@pytest.mark.parametrize("name", NAMES)
def test_the_average_of_timm_is_of_frames_and_its_checkpoint_loads(timm: Any, name: str, tmp_path: Path):
    images = torch.randn(2, 3, 16, 16, generator=seeds.generator(1))
    net = transformer(timm, name)
    for options in ({"foreach": True}, {"foreach": False}, {"exclude_buffers": True}):
        average = timm.utils.ModelEmaV3(net, decay=0.5, **options)
        trained(net, name, lambda each: each(images).square().mean(), lambda average=average: average.update(net))
        found = average(images)
        assert worst(average.module) < 1
        torch.save({"state_dict": average.module.state_dict()}, tmp_path / "average.pt")
        loaded = copy.deepcopy(net).eval()
        timm.models.load_checkpoint(loaded, str(tmp_path / "average.pt"))
        assert torch.allclose(loaded(images), found, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*shrinks 'skew':UserWarning")
def test_optimizers_of_timm_move_free_coordinates_and_refuse_frames(timm: Any):
    images = torch.randn(2, 3, 16, 16, generator=seeds.generator(2))
    create_optimizer = importlib.import_module("timm.optim").create_optimizer_v2
    for kind in ("adamw", "lamb", "lookahead_nadamw"):
        net, framed = (transformer(timm, name) for name in ("cayley", "stiefel"))
        before = net.blocks[0].attn.proj.weight.detach().clone()
        optimizer = create_optimizer(net, opt=kind, lr=1e-2, weight_decay=0.05, layer_decay=0.7)
        net(images).square().mean().backward()
        optimizer.step()
        assert torch.dist(net.blocks[0].attn.proj.weight, before) > 0
        assert worst(net) < 1
        optimizer = create_optimizer(framed, opt=kind, lr=1e-2, layer_decay=0.7)
        framed(images).square().mean().backward()
        with pytest.raises(errors.OptimizerError, match="frame"):
            optimizer.step()


@pytest.fixture(scope="module")
def diffusers() -> Any:
    return pytest.importorskip("diffusers", reason="needs the extra [interop]")


def unet(diffusers: Any, name: str) -> Any:
    class Net(diffusers.UNet2DConditionModel):
        def __init__(self) -> None:
            super().__init__(**UNET)
            sk.orthogonal(self, ["*.to_q.weight", "*.to_k.weight", "*.to_v.weight", "*.to_out.0.weight"], name)

    return Net


def denoised(net: Any) -> torch.Tensor:
    draws = seeds.generator(3)
    noisy, words = torch.randn(2, 3, 8, 8, generator=draws), torch.randn(2, 5, 8, generator=draws)
    return net(noisy.to(net.dtype), torch.tensor([3, 7]), words.to(net.dtype)).sample.float()


@pytest.mark.parametrize("name", ["cayley", "stiefel"])
def test_a_net_of_diffusers_is_fused_stored_coarsely_and_saved_as_what_it_computes(
    diffusers: Any, name: str, tmp_path: Path
):
    kind = unet(diffusers, name)
    net = kind().eval()
    expected = denoised(net)
    net.fuse_qkv_projections()
    assert torch.allclose(denoised(net), expected, atol=1e-5)
    net.unfuse_qkv_projections()
    for options in ({}, {"variant": "fp16"}, {"max_shard_size": "20KB"}):
        folder = tmp_path / "_".join(options or ["plain"])
        net.save_pretrained(folder, **options)
        loaded = kind.from_pretrained(folder, variant=options.get("variant")).eval()
        assert torch.equal(denoised(loaded), expected)
    with pytest.raises(errors.CheckpointError, match="cast the model after"):
        denoised(kind.from_pretrained(tmp_path / "plain", torch_dtype=torch.bfloat16))
    weights = {key: drift.error for key, drift in sk.drift(net).items()}
    net.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    denoised(net)
    assert {key: drift.error for key, drift in sk.drift(net.float()).items()} == weights


@pytest.mark.parametrize("name", ["cayley", "stiefel"])
def test_the_average_of_diffusers_is_of_frames_and_goes_back(diffusers: Any, name: str, tmp_path: Path):
    kind = unet(diffusers, name)
    net = kind()
    average = diffusers.training_utils.EMAModel(net.parameters(), decay=0.5, model_cls=kind, model_config=net.config)
    trained(net, name, lambda each: denoised(each).square().mean(), lambda: average.step(net.parameters()))
    net.eval()
    before = denoised(net)
    average.store(net.parameters())
    average.copy_to(net.parameters())
    found = denoised(net)
    assert torch.dist(found, before) > 0
    assert worst(net) < 1
    net.save_pretrained(tmp_path)  # the average's own save_pretrained takes parameters without their chart
    average.restore(net.parameters())
    assert torch.allclose(denoised(net), before, atol=1e-5)
    assert torch.allclose(denoised(kind.from_pretrained(tmp_path).eval()), found, atol=1e-5)
