"""Times `reflector_scan`, forward and backward, beside the loop over keys and a chunked form in torch's operators.

    python examples/reflector_times.py --steps 512 1024
    python examples/reflector_times.py --predict    # what an H100 would take, by what its operators read and write

Both others are written here after flash-linear-attention's naive forms of the delta rule, in float32, for D x D states
and unit keys with beta 2: https://github.com/fla-org/flash-linear-attention. `--ours` leaves them out, which keep all
states of the loop, or all chunks, for the backward pass.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from stiefelkit._torch import TorchDispatchMode, is_view_operator
from stiefelkit.measuring.clock import Run, race
from stiefelkit.scan import reflector_scan

BYTES_A_SECOND, FLOPS = 3.35e12, 67e12
"""Of an H100 SXM: its memory, and its tensor cores in float64."""


class Traffic(TorchDispatchMode):
    """Adds up the bytes of all tensors that operators take and return, but views."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if not (is_view_operator(func) or "empty" in func.overloadpacket.__name__):
            tensors = [t for t in tree_leaves((args, kwargs, found)) if isinstance(t, Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return found


def naive(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
    state, out = first, []
    for t in range(k.shape[1]):
        for i in range(k.shape[2]):
            key = k[:, t, i, ..., None]
            state = state + 2 * key * (v[:, t, i, :, None] - (key * state).sum(-2, keepdim=True))
        out.append((q[:, t, ..., None] * state).sum(-2))
    return torch.stack(out, 1)


def chunked(q: Tensor, k: Tensor, v: Tensor, first: Tensor, size: int = 64) -> Tensor:
    m = k.shape[2]
    c = size // m
    queries = q.unflatten(1, (-1, c)).permute(1, 0, 3, 2, 4)
    keys, values = (t.flatten(1, 2).unflatten(1, (-1, size)).permute(1, 0, 3, 2, 4) for t in (k, v))
    below = -2 * (keys @ keys.mT).tril(-1)
    rows = [below[..., :1, :]]
    for i in range(1, size):  # of the inverse, less the identity, by those above
        row = below[..., i : i + 1, :]
        rows.append(row + row[..., :i] @ torch.cat(rows, -2))
    inverse = 2 * (torch.cat(rows, -2) + torch.eye(size))
    w, driven = inverse @ keys, inverse @ values
    seen = torch.ones(c, c).tril().repeat_interleave(m, 1)
    state, out = first, []
    for query, key, left, right in zip(queries, keys, w, driven, strict=True):
        u = right - left @ state
        out.append(query @ state + (query @ key.mT * seen) @ u)
        state = state + key.mT @ u
    return torch.stack(out).permute(1, 0, 3, 2, 4).flatten(1, 2)


def ours(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
    out, _ = reflector_scan(q, k, v, initial=first)
    assert out is not None
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--size", type=int, default=64, help="D")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--predict", action="store_true", help="count bytes of few steps, for 4,096 of them")
    parser.add_argument("--ours", action="store_true", help="time reflector_scan alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = args.heads, args.size

    def drawn(batch: int, steps: int) -> tuple[list[Tensor], Tensor]:
        q, k, v = (torch.randn(batch, steps, *lead, *shape) for lead in ((), (2,), (2,)))
        tensors = [q, F.normalize(k, dim=-1), v, torch.randn(batch, *shape, args.size)]
        return [t.requires_grad_() for t in tensors], torch.randn(batch, steps, *shape)

    def both_ways(form: Callable[..., Tensor], tensors: list[Tensor], g: Tensor) -> None:
        torch.autograd.grad(form(*tensors), tensors, g)

    if args.predict:
        few = drawn(1, 256)  # in one segment
        with Traffic() as traffic, FlopCounterMode(display=False) as flops:
            both_ways(ours, *few)
        times = args.batch * 4096 / 256
        moved, products = times * traffic.bytes, times * flops.get_total_flops()
        print(f"{moved / 1e9:.0f} GB: {1e3 * moved / BYTES_A_SECOND:.0f} ms; ", end="")
        print(f"{products / 1e12:.2f} TFLOP: {1e3 * products / FLOPS:.1f} ms")
        return
    print(f"{'CPU seconds, forward and backward':36}" + "".join(f"{name:>10}" for name in ("ours", "chunked", "loop")))
    for steps in args.steps:
        given = drawn(args.batch, steps)
        forms = (ours,) if args.ours else (ours, chunked, naive)
        runs: dict[str, Run] = {form.__name__: partial(both_ways, form, *given) for form in forms}
        found = race(runs, repeats=args.rounds, seconds=1e4)
        print(f"{f'T = {steps}':36}" + "".join(f"{timing.median:10.2f}" for timing in found.values()), flush=True)


if __name__ == "__main__":
    main()
