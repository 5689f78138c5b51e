"""Diamonds of a mesh of rotations as matrices: joined from four quarters, and taken apart again.

With B in front, L and R on the upper and lower wires and A behind, D = (I + A + I)(L + R)(I + B + I), direct sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stiefelkit.functional._arithmetic.product import product
from stiefelkit.functional._diagonal import rotations
from stiefelkit.functional._rotations.plan import Plan

__all__ = ["diamonds", "flush", "multiply", "quartered"]

_MANY = 100


def diamonds(angle: Tensor, phase: Tensor | None, plan: Plan, dtype: torch.dtype) -> list[Tensor]:
    """Diamonds of every size 1, 2, 4, ..., each a tensor (count, 2m, 2m), its four quarters one after another."""
    t = plan.scatter(angle.to(dtype.to_real()))
    f = None if phase is None else plan.scatter(phase.to(dtype.to_real()))
    levels = [rotations(t, f, 0).view(2, 2, *t.shape).movedim(-1, 0)]
    for m in plan.sizes[:-1]:
        layout = Layout.of(m, len(levels[-1]) // 4)
        levels[-1] = layout.store(levels[-1])
        levels.append(flush(layout.join(levels[-1])))
    return levels


def quartered(k: Tensor, levels: Sequence[Tensor]) -> Tensor:
    """Takes K behind the largest diamonds to K behind each rotation; overwrites K.

    Args:
        k: skew-Hermitian matrices of shape (count, 2m, 2m).
        levels: what `diamonds` gives.

    Returns:
        Tensor of shape (count of rotations, 2, 2).
    """
    for d in reversed(levels[:-1]):
        layout = Layout.of(d.shape[-1] // 2, len(k))
        k = layout.quarter(layout.store(k), d)
    return k


@dataclass(frozen=True)
class Layout:
    """How many small matrices (count, rows, columns) lie in memory, and what is done with them there.

    Attributes:
        last: entry by entry, for products of tiny matrices by elementwise operations; else matrix by matrix.
    """

    last: bool

    @classmethod
    def of(cls, m: int, count: int) -> "Layout":
        """Returns the faster layout in which so many diamonds are joined from, or taken apart into, four of size m."""
        return cls(count >= _MANY * m)

    def store(self, d: Tensor) -> Tensor:
        """Puts matrices of another layout into this one."""
        return d.movedim(0, -1).contiguous().movedim(-1, 0) if self.last else d.contiguous()

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns a @ B, by elementwise products if the matrices are tiny."""
        if not self.last:
            return multiply(a, b)
        columns, rows = a.movedim(0, -1).unsqueeze(2).unbind(1), b.movedim(0, -1).unbind(0)
        out = columns[0] * rows[0]
        for column, row in zip(columns[1:], rows[1:], strict=True):
            out = torch.addcmul(out, column, row) if torch.is_grad_enabled() else out.addcmul_(column, row)
        return out.movedim(-1, 0)

    def empty(self, like: Tensor, count: int, size: int, columns: int) -> Tensor:
        """Room for matrices."""
        if self.last:
            return like.new_empty(size, columns, count).movedim(-1, 0)
        return like.new_empty(count, size, columns)

    def join(self, d: Tensor) -> Tensor:
        """Makes diamonds of 4m wires from their quarters of 2m wires."""
        m = d.shape[-1] // 2
        b, l, r, a = d.chunk(4)
        out = self.empty(d, len(b), 4 * m, 4 * m)
        out[:, 2 * m :, :m] = 0
        out[:, : 2 * m, 3 * m :] = 0
        out[:, : 2 * m, :m] = l[:, :, :m]
        out[:, : 2 * m, m : 3 * m] = self.times(l[:, :, m:], b[:, :m])
        out[:, 2 * m :, m : 3 * m] = self.times(r[:, :, :m], b[:, m:])
        out[:, 2 * m :, 3 * m :] = r[:, :, m:]
        out[:, m : 3 * m] = self.times(a, _unwritten(out[:, m : 3 * m]))
        return out

    def quarter(self, k: Tensor, d: Tensor) -> Tensor:
        """Takes K behind diamonds of 4m wires to K behind each of their quarters D; overwrites K."""
        m = d.shape[-1] // 2
        _, l, r, a = d.chunk(4)
        count, inner = len(k), slice(m, 3 * m)
        out = self.empty(k, 4 * count, 2 * m, 2 * m)
        out[3 * count :] = k[:, inner, inner]
        k[:, :, inner] = self.times(_unwritten(k[:, :, inner]), a)
        k[:, inner] = self.times(a.mH, _unwritten(k[:, inner]))
        out[count : 2 * count] = k[:, : 2 * m, : 2 * m]
        out[2 * count : 3 * count] = k[:, 2 * m :, 2 * m :]
        l, r = l[:, :, m:], r[:, :, :m]
        z = self.empty(k, count, 4 * m, 2 * m)
        z[:, :, :m] = self.times(k[:, :, : 2 * m], l)
        z[:, :, m:] = self.times(k[:, :, 2 * m :], r)
        out[:count, :m] = self.times(l.mH, z[:, : 2 * m])
        out[:count, m:] = self.times(r.mH, z[:, 2 * m :])
        return out


def _unwritten(x: Tensor) -> Tensor:
    """Returns what a product may keep for its derivative while X is overwritten."""
    return x.clone() if torch.is_grad_enabled() else x


def flush(x: Tensor) -> Tensor:
    """Puts zeros for entries below eps^2 in place, unless a derivative may have to pass."""
    if torch.is_grad_enabled():
        return x
    parts = torch.view_as_real(x) if x.is_complex() else x
    torch.hardshrink(parts, torch.finfo(x.dtype).eps ** 2, out=parts)
    return x


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ B for a batch (count, rows, columns); the opaque operators that call it see to full precision."""
    return product(a, b) if torch.is_grad_enabled() else torch.bmm(a, b)
