"""A family of decoders to begin with, and a small model of it."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from stiefelkit.nn.decoders import Decoder

# The places of the layers, by their names inside a base model, and inside its blocks.
skeleton = Decoder(
    classes=("SkeletonModel",),
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
    """Returns the model that the laws are checked on: of your library, with random weights."""
    torch.manual_seed(0)
    return SkeletonForCausalLM(SimpleNamespace(vocab_size=20, hidden_size=16, num_attention_heads=2, layers=2))


class SkeletonForCausalLM(nn.Module):
    """A base model and its head; with a model of your library, the classes from here on go."""

    def __init__(self, config):
        super().__init__()
        self.base, self.head = SkeletonModel(config), nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def get_output_embeddings(self):
        """The head."""
        return self.head

    def forward(self, tokens):
        """Tokens to logits."""
        return self.head(self.base(tokens))


class SkeletonModel(nn.Module):
    """Embedding, blocks and the last norm."""

    def __init__(self, config):
        super().__init__()
        self.config, n = config, config.hidden_size
        self.embedding, self.norm = nn.Embedding(config.vocab_size, n), nn.RMSNorm(n)
        self.layers = nn.ModuleList(SkeletonBlock(n, config.num_attention_heads) for _ in range(config.layers))

    def forward(self, tokens):
        """Tokens to the normed stream."""
        h = self.embedding(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.norm(h)


class SkeletonBlock(nn.Module):
    """Attention and an MLP, each behind a norm and added to the stream."""

    def __init__(self, n, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.RMSNorm(n), nn.RMSNorm(n)
        self.query, self.key, self.value, self.out = (nn.Linear(n, n) for _ in range(4))
        self.up, self.down = nn.Linear(n, 2 * n), nn.Linear(2 * n, n)

    def forward(self, h):
        """The stream to the next."""
        x = self.before_attention(h)
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.query, self.key, self.value))
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return h + self.down(F.gelu(self.up(self.before_mlp(h))))
