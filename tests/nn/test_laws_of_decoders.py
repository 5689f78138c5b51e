"""A family of decoders keeps the laws of decoders, and each law catches a family that breaks it."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from decoder_laws import LAWS, check_decoder
from torch import nn

from stiefelkit.errors import StiefelkitError
from stiefelkit.nn.decoders import Decoder, decoders

FAMILY = Decoder(
    classes={"SmallModel": {}},
    embeddings=("embedding",),
    blocks="layers",
    norms={"before_attention": ("query", "key", "value"), "before_mlp": ("up",)},
    writers=("out", "down"),
    final="norm",
    value="value",
    output="out",
    downs=("down",),
)


def small_model():
    torch.manual_seed(0)
    return SmallForCausalLM(SimpleNamespace(vocab_size=20, hidden_size=16, num_attention_heads=2, layers=2))


class SmallForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.base, self.head = SmallModel(config), nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens):
        return self.head(self.base(tokens))


class SmallModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, n = config, config.hidden_size
        self.embedding, self.norm = nn.Embedding(config.vocab_size, n), nn.RMSNorm(n)
        self.layers = nn.ModuleList(SmallBlock(n, config.num_attention_heads) for _ in range(config.layers))

    def forward(self, tokens):
        h = self.embedding(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.norm(h)


class SmallBlock(nn.Module):
    """Attention and an MLP, each behind a norm and added to the stream."""

    def __init__(self, n, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.RMSNorm(n), nn.RMSNorm(n)
        self.query, self.key, self.value, self.out = (nn.Linear(n, n) for _ in range(4))
        self.up, self.down = nn.Linear(n, 2 * n), nn.Linear(2 * n, n)

    def forward(self, h):
        x = self.before_attention(h)
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.query, self.key, self.value))
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return h + self.down(F.gelu(self.up(self.before_mlp(h))))


SABOTEURS = {
    "known": {"classes": {"Another": {}}},
    "norms": {"norms": {"before_attention": ("query", "key"), "before_mlp": ("up",)}},
    "rotations": {"value": "key"},
    "learned": {"writers": ("out",)},
}


@pytest.fixture
def registered(monkeypatch):
    """Registers a family for one test."""

    def register(**changes):
        monkeypatch.setitem(decoders, "mine", dataclasses.replace(FAMILY, **changes))

    return register


def test_a_family_keeps_the_laws_and_its_model_stays_as_it_was(registered):
    registered()
    model = small_model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    check_decoder("mine", model)
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("law", LAWS)
def test_the_law_catches_its_saboteur(law, registered):
    registered(**SABOTEURS[law])
    with pytest.raises((AssertionError, StiefelkitError)):
        check_decoder("mine", small_model(), [law])
