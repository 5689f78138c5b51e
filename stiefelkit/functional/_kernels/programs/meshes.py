"""Columns behind all layers of a mesh of rotations in a brick pattern, and gradients, as Triton programs."""

import triton
import triton.language as tl
from triton.language import constexpr

from .parts import load_parts, plus, store_parts, times


@triton.jit(do_not_specialize=["total", "count"])
def mesh_turns(angle, phase, out, total, count, PARTS: constexpr, SIZE: constexpr):
    """OUT = cosines and sines of angles, then of phases, float64 (batch, 2 PARTS, total), of (batch, total) each.

    Memory of a thread is touched by the reduction of huge angles alone.
    """
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    place = out + i // total * 2 * PARTS * total + i % total
    for part in tl.static_range(PARTS):
        t = tl.load((phase if part else angle) + i, mask=i < count, other=0.0).to(tl.float64)
        tl.store(place + 2 * part * total, tl.cos(t), mask=i < count)
        tl.store(place + (2 * part + 1) * total, tl.sin(t), mask=i < count)


@triton.jit
def _layer(turns, matrix, total, layer, line, n, PARTS: constexpr):
    """Returns where rotations stand, which wires turn, which are upper, their partners, and cosines and sines."""
    odd = layer % 2
    pair = (line - odd + 2) // 2 - 1
    inside = (pair >= 0) & (2 * pair + odd + 1 < n)
    is_upper = (line + odd) % 2 == 0
    at = (layer + 1) // 2 * (n // 2) + layer // 2 * ((n - 1) // 2) + pair
    here = turns + matrix * 2 * PARTS * total + at
    c = tl.load(here, mask=inside, other=1.0)
    s = tl.load(here + total, mask=inside, other=0.0)
    e_re = c * 0.0 + 1.0
    e_im = c * 0.0
    if PARTS == 2:
        e_re = tl.load(here + 2 * total, mask=inside, other=1.0)
        e_im = tl.load(here + 3 * total, mask=inside, other=0.0)
    return at, inside, is_upper, tl.where(inside, tl.where(is_upper, line + 1, line - 1), line), c, s, e_re, e_im


@triton.jit
def _partners(x, scratch, place, partner, column, N: constexpr):
    """Returns the entries of partners, through memory that nobody else reads until the next but one."""
    tl.store(scratch + place, x)
    tl.debug_barrier()
    return tl.load(scratch + column * N + partner)


@triton.jit
def _turned(re, im, e_re, e_im, is_it):
    """Multiplies some entries by a phase."""
    turned_re, turned_im = times(re, im, e_re, e_im)
    return tl.where(is_it, turned_re, re), tl.where(is_it, turned_im, im)


@triton.jit(do_not_specialize=["n", "p", "layers", "total"])
def mesh_forward(
    x, turns, y, scratch, n, p, layers, total, COUNT: constexpr, PARTS: constexpr, C: constexpr, N: constexpr
):
    """Y = F_L ... F_1 X, worked out in float64 and rounded once.

    `x` and `y` are (batch, n, p, PARTS); `turns` cosines and sines of angles, then of phases, (batch, 2 PARTS, total),
    float64; `scratch` float64 (programs, 2, PARTS, C, N). COUNT programs share a matrix, C columns at a time.
    """
    matrix = (tl.program_id(0) // COUNT).to(tl.int64)
    line = tl.arange(0, N)[None, :]
    one = tl.arange(0, C)[:, None]
    place = one * N + line
    own = scratch + tl.program_id(0).to(tl.int64) * 2 * PARTS * C * N
    for start in tl.range(tl.program_id(0) % COUNT * C, p, COUNT * C, num_stages=1):
        inside = (line < n) & (start + one < p)
        here = ((matrix * n + line) * p + start + one) * PARTS
        re, im = load_parts(x + here, inside, PARTS)
        for layer in tl.range(layers, num_stages=1):
            _, _, is_upper, partner, c, s, e_re, e_im = _layer(turns, matrix, total, layer, line, n, PARTS)
            buffer = own + layer % 2 * PARTS * C * N
            s = tl.where(is_upper, -s, s)
            if PARTS == 2:
                re, im = _turned(re, im, e_re, e_im, (is_upper == 0) & (partner != line))
                other = _partners(im, buffer + C * N, place, partner, one, N)
                im = c * im + s * other
            re = c * re + s * _partners(re, buffer, place, partner, one, N)
        store_parts(y + here, re, im, inside, PARTS)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["n", "p", "layers", "total"])
def mesh_backward(
    y, g, turns, gx, slopes, scratch, n, p, layers, total,
    COUNT: constexpr, PARTS: constexpr, C: constexpr, N: constexpr,
):  # fmt: skip
    """Takes Y and its gradient G back layer by layer: writes to SLOPES what columns say of angles, and of phases.

    `slopes` are (batch, COUNT, PARTS, total); `gx` is the gradient of X, or None; `scratch` has twice the matrices.
    The others are as in `mesh_forward`.
    """
    matrix = (tl.program_id(0) // COUNT).to(tl.int64)
    line = tl.arange(0, N)[None, :]
    one = tl.arange(0, C)[:, None]
    place = one * N + line
    size: constexpr = C * N
    own = scratch + tl.program_id(0).to(tl.int64) * 4 * PARTS * size
    for start in tl.range(tl.program_id(0) % COUNT * C, p, COUNT * C, num_stages=1):
        inside = (line < n) & (start + one < p)
        here = ((matrix * n + line) * p + start + one) * PARTS
        re, im = load_parts(y + here, inside, PARTS)
        g_re, g_im = load_parts(g + here, inside, PARTS)
        for back in tl.range(layers, num_stages=1):
            layer = layers - 1 - back
            at, turns_here, is_upper, partner, c, s, e_re, e_im = _layer(turns, matrix, total, layer, line, n, PARTS)
            buffer = own + layer % 2 * 2 * PARTS * size
            s = tl.where(is_upper, s, -s)
            other = _partners(re, buffer, place, partner, one, N)
            g_other = _partners(g_re, buffer + size, place, partner, one, N)
            slope = re * g_other - other * g_re
            re = c * re + s * other
            g_re = c * g_re + s * g_other
            out = slopes + tl.program_id(0).to(tl.int64) * PARTS * total + at
            is_more = start >= COUNT * C  # the first columns find nothing to add to
            if PARTS == 2:
                other = _partners(im, buffer + 2 * size, place, partner, one, N)
                g_other = _partners(g_im, buffer + 3 * size, place, partner, one, N)
                slope += im * g_other - other * g_im
                im = c * im + s * other
                g_im = c * g_im + s * g_other
                is_lower = turns_here & (is_upper == 0)
                turned = tl.reduce(re * g_im - im * g_re, 0, plus)[None, :]
                tl.store(out + total, tl.load(out + total, mask=is_lower & is_more, other=0.0) + turned, mask=is_lower)
                re, im = _turned(re, im, e_re, -e_im, is_lower)
                g_re, g_im = _turned(g_re, g_im, e_re, -e_im, is_lower)
            is_it = turns_here & is_upper
            tl.store(
                out, tl.load(out, mask=is_it & is_more, other=0.0) + tl.reduce(slope, 0, plus)[None, :], mask=is_it
            )
        if gx is not None:
            store_parts(gx + here, g_re, g_im, inside, PARTS)
        tl.debug_barrier()
