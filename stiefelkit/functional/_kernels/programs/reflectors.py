"""Columns of products of reflectors, and their gradients, as Triton programs that hold some columns in registers."""

import triton
import triton.language as tl
from triton.language import constexpr

from .parts import load_parts, plus, store_parts


@triton.jit
def _reflector(v, j, line, n, k, PARTS: constexpr):
    """Returns where column j of the trapezoid stands and which of it is there, its parts, and 2 / |u|^2, 0 for 0."""
    inside = (line >= j) & (line < n)
    at = tl.where(line < k, line * (line + 1) // 2, k * (k + 1) // 2 + j * (n - k - 1) + line - k) + j
    re = tl.load(v + at, mask=inside, other=0.0).to(tl.float64)
    im = re * 0.0
    if PARTS == 2:
        im = tl.load(v + n * k - k * (k - 1) // 2 + at, mask=inside, other=0.0).to(tl.float64)
    square = tl.reduce(re * re + im * im, 1, plus)[:, None]
    return at, inside, re, im, tl.where(square == 0, 0.0, 2.0 / square)


@triton.jit
def _along(u_re, u_im, re, im, PARTS: constexpr):
    """Returns u^H x for columns x."""
    if PARTS == 1:
        a = tl.reduce(u_re * re, 1, plus)[:, None]
        return a, a * 0.0
    a = tl.reduce(u_re * re + u_im * im, 1, plus)[:, None]
    return a, tl.reduce(u_re * im - u_im * re, 1, plus)[:, None]


@triton.jit
def _less(re, im, u_re, u_im, a_re, a_im, PARTS: constexpr):
    """Returns x - u a for columns x."""
    if PARTS == 1:
        return re - u_re * a_re, im
    return re - (u_re * a_re - u_im * a_im), im - (u_re * a_im + u_im * a_re)


@triton.jit(do_not_specialize=["n", "k", "p"])
def reflectors_forward(v, d, w, n, k, p, COUNT: constexpr, PARTS: constexpr, C: constexpr, N: constexpr):
    """W = H_1 ... H_k [D; 0], worked out in float64 and rounded once.

    `v` are packed reflectors (batch, size), `d` the entries of D, float64 (batch, p, PARTS), `w` frames (batch, n, p,
    PARTS); COUNT programs share the columns of a matrix, C of them at a time.
    """
    matrix = (tl.program_id(0) // COUNT).to(tl.int64)
    size = (n * k - k * (k - 1) // 2) * PARTS
    line = tl.arange(0, N)[None, :]
    for start in tl.range(tl.program_id(0) % COUNT * C, p, COUNT * C, num_stages=1):
        column = start + tl.arange(0, C)[:, None]
        re, im = load_parts(d + (matrix * p + column) * PARTS, column < p, PARTS)
        re = tl.where(line == column, re, 0.0)
        im = tl.where(line == column, im, 0.0)
        steps = tl.minimum(k, start + C)  # later reflectors are zero where these columns are not
        for step in tl.range(steps, num_stages=1):
            _, _, u_re, u_im, tau = _reflector(v + matrix * size, steps - 1 - step, line, n, k, PARTS)
            a_re, a_im = _along(u_re, u_im, re, im, PARTS)
            re, im = _less(re, im, u_re, u_im, tau * a_re, tau * a_im, PARTS)
        inside = (line < n) & (column < p)
        store_parts(w + ((matrix * n + line) * p + column) * PARTS, re, im, inside, PARTS)


@triton.jit(do_not_specialize=["n", "k", "p"])
def reflectors_backward(v, w, g, gv, n, k, p, COUNT: constexpr, PARTS: constexpr, C: constexpr, N: constexpr):
    """Adds to GV (batch, COUNT, size) what columns of W and those of its gradient G say of packed reflectors.

    It takes both back through one reflector after another, H y = x, with g = dL/dy, a = u^H y, b = u^H g: dL/du =
    t (g conj(a) - x conj(b)) - t^2 u Re(conj(b) a), t = 2 / |u|^2. The others are as in `reflectors_forward`.
    """
    matrix = (tl.program_id(0) // COUNT).to(tl.int64)
    size = (n * k - k * (k - 1) // 2) * PARTS
    line = tl.arange(0, N)[None, :]
    for start in tl.range(tl.program_id(0) % COUNT * C, p, COUNT * C, num_stages=1):
        column = start + tl.arange(0, C)[:, None]
        here = ((matrix * n + line) * p + column) * PARTS
        inside = (line < n) & (column < p)
        re, im = load_parts(w + here, inside, PARTS)
        g_re, g_im = load_parts(g + here, inside, PARTS)
        for j in tl.range(tl.minimum(k, start + C), num_stages=1):
            at, is_there, u_re, u_im, tau = _reflector(v + matrix * size, j, line, n, k, PARTS)
            a_re, a_im = _along(u_re, u_im, re, im, PARTS)
            b_re, b_im = _along(u_re, u_im, g_re, g_im, PARTS)
            re, im = _less(re, im, u_re, u_im, tau * a_re, tau * a_im, PARTS)
            across = tau * tl.reduce(b_re * a_re + b_im * a_im, 0, plus)[None, :]
            # A reflector of one entry is -1, whatever the entry.
            tau_here = tl.where(j == n - 1, 0.0, tau)
            out = gv + tl.program_id(0).to(tl.int64) * size + at
            slope = g_re * a_re - re * b_re
            if PARTS == 2:
                slope += g_im * a_im - im * b_im
                other = g_im * a_re - g_re * a_im - (im * b_re - re * b_im)
                total = tau_here * (tl.reduce(other, 0, plus)[None, :] - across * u_im)
                tl.store(out + size // 2, tl.load(out + size // 2, mask=is_there) + total, mask=is_there)
            total = tau_here * (tl.reduce(slope, 0, plus)[None, :] - across * u_re)
            tl.store(out, tl.load(out, mask=is_there) + total, mask=is_there)
            g_re, g_im = _less(g_re, g_im, u_re, u_im, tau * b_re, tau * b_im, PARTS)
