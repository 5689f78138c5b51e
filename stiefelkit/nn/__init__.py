"""Layers with orthogonal and unitary weights."""

from stiefelkit.errors import suggest_names
from stiefelkit.nn.activations import ModReLU
from stiefelkit.nn.adapter import Adapter, OrthogonalAdapter
from stiefelkit.nn.adapters import (
    adapt,
    adapter_state,
    adapters,
    base_state,
    delete_adapter,
    fold,
    load_adapter_state,
    use_adapters,
    without_adapters,
)
from stiefelkit.nn.butterfly import ButterflyAdapter
from stiefelkit.nn.cayley_conv import CayleyConv1d, CayleyConv2d
from stiefelkit.nn.conv import OrthogonalConv1d, OrthogonalConv2d, OrthogonalConvTranspose1d, OrthogonalConvTranspose2d
from stiefelkit.nn.decoders import RotationSites, rotation_sites
from stiefelkit.nn.goru import GORU
from stiefelkit.nn.key_rotation import KeyRotation, restore_keys_, rotate_keys_
from stiefelkit.nn.linear import HadamardLinear, OrthogonalLinear
from stiefelkit.nn.lora import Lora, LoraLayer, to_lora
from stiefelkit.nn.low_rank import LowRankAdapter, PrincipalAdapter
from stiefelkit.nn.peft_files import load_peft, save_peft
from stiefelkit.nn.reflector_rnn import ReflectorBlock, ReflectorRNN
from stiefelkit.nn.rnn import LinearTransitionRNN, OrthogonalRNN, OrthogonalRNNCell
from stiefelkit.nn.rotated_decoder import Rotated, fake_quantize, rotated
from stiefelkit.nn.rotation import absorb_norm_, absorb_norms_, mean_preserving, rotate_
from stiefelkit.nn.rotation_rnn import LRU, LRUBlock, RotationBlock, RotationRNN
from stiefelkit.nn.transforms import load_transforms, save_transforms

__all__ = [
    "GORU", "LRU", "Adapter", "ButterflyAdapter", "CayleyConv1d", "CayleyConv2d", "HadamardLinear", "KeyRotation",
    "LRUBlock", "LinearTransitionRNN", "Lora", "LoraLayer", "LowRankAdapter", "ModReLU", "OrthogonalAdapter",
    "OrthogonalConv1d", "OrthogonalConv2d", "OrthogonalConvTranspose1d", "OrthogonalConvTranspose2d",
    "OrthogonalLinear", "OrthogonalRNN", "OrthogonalRNNCell", "PrincipalAdapter", "ReflectorBlock", "ReflectorRNN",
    "Rotated", "RotationBlock", "RotationRNN", "RotationSites", "absorb_norm_", "absorb_norms_", "adapt",
    "adapter_state", "adapters", "base_state", "delete_adapter", "fake_quantize", "fold", "load_adapter_state",
    "load_peft", "load_transforms", "mean_preserving", "restore_keys_", "rotate_", "rotate_keys_", "rotated",
    "rotation_sites", "save_peft", "save_transforms", "to_lora", "use_adapters", "without_adapters",
]  # fmt: skip
suggest_names(__name__)
