"""Frames as points of a geoopt manifold: shapes, dtypes, dimensions and random draws."""

from collections.abc import Sequence
from typing import Any

import geoopt
import torch
from geoopt.utils import size2shape
from torch import Tensor

from stiefelkit import init
from stiefelkit.errors import DtypeError, NotAFrameError, OptionError, ShapeError, shown
from stiefelkit.functional import skew_size
from stiefelkit.manifolds.checks import DTYPES, judged, widened, wrong_dtype
from stiefelkit.metrics import orthogonality_error, working_dtype
from stiefelkit.numbers import one_of, sizes
from stiefelkit.tensors import check_tensors


class Frames(geoopt.Manifold):
    """The points of a Stiefel manifold, n x p matrices with orthonormal columns; a subclass moves them."""

    name = "Stiefel"
    ndim = 2

    def dim(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> int:
        """Returns the real dimension of the manifold of one frame: np - p(p + 1)/2, and 2np - p^2 where complex.

        Args:
            size: (*, n, p), as integers or one sequence; how large the batch is does not count.
            dtype: of the frames; torch's default when None.

        >>> from stiefelkit.manifolds import Stiefel
        >>> Stiefel().dim(5, 2), Stiefel().dim(5, 2, dtype=torch.complex64)
        (7, 16)
        """
        (*_, n, p), dtype = self._size(size, dtype)
        return skew_size(n, p, dtype.is_complex)

    def typical_dist(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> float:
        """Returns a length to measure steps and trust regions by, sqrt(p) for each frame, as Manopt has it.

        The root mean square of the chord ||X - Y||_F of random frames is sqrt(2) times that. Size and dtype are as in
        `dim`.

        References:
            Boumal, Mishra, Absil, Sepulchre, Manopt, a Matlab toolbox for optimization on manifolds, JMLR 15, 2014.
        """
        return self._size(size, dtype)[0][-1] ** 0.5

    def random(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
        det: int | None = None,
        **kwargs: Any,
    ) -> geoopt.ManifoldTensor:
        """Draws frames from the uniform (Haar) measure, each matrix of a batch independently.

        Args:
            size: (*, n, p), as integers or one sequence.
            dtype: torch's default when None.
            device: of the result.
            generator: source of randomness; torch's default when None.
            det: 1 or -1 for the uniform measure on that component of O(n), real square frames only; either when None.
            kwargs: none are known.

        Raises:
            OptionError: another `det`, or one for frames that have one component; an unknown option.
            ShapeError, DtypeError: no frames have this size or dtype.
        """
        if kwargs:
            raise OptionError(f"Stiefel.random needs dtype, device, generator and det only, got {', '.join(kwargs)}.")
        shape, dtype = self._size(size, dtype)
        if det is not None and (not one_of(1, -1).holds(det) or shape[-2] != shape[-1] or dtype.is_complex):
            raise OptionError(
                "Stiefel.random needs `det` to be 1 or -1, for real square frames, or None, got "
                f"{shown(det)} for {dtype} of size {tuple(shape)}."
            )
        w = init.haar(shape, working_dtype(dtype), generator)
        if det is not None:
            # Haar measure on either component is the other's with one column reflected.
            w[..., 0] *= det * torch.linalg.det(w).sign().unsqueeze(-1)
        return self._point(w, dtype, device)

    def random_naive(self, *size: int | Sequence[int], **options: Any) -> geoopt.ManifoldTensor:
        """Draws frames as `random` does: geoopt's name for frames of any measure, here the uniform one."""
        return self.random(*size, **options)

    def origin(
        self,
        *size: int | Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        seed: int | None = 42,
    ) -> geoopt.ManifoldTensor:
        """Returns the first p columns of the identity, for any seed."""
        shape, dtype = self._size(size, dtype)
        return self._point(init.identity(shape, working_dtype(dtype)), dtype, device)

    def _size(self, size: Any, dtype: torch.dtype | None) -> tuple[Sequence[int], torch.dtype]:
        shape, dtype = sizes(size2shape(*size)), dtype or torch.get_default_dtype()
        if shape is None:
            raise ShapeError(f"Stiefel needs `size` of shape (*, n, p), integers all, got {shown(size)}.")
        self._assert_check_shape(shape, "size")
        self._assert_dtype(dtype)
        return shape, dtype

    def _point(self, w: Tensor, dtype: torch.dtype, device: Any) -> geoopt.ManifoldTensor:
        return geoopt.ManifoldTensor(w.to(device=device, dtype=dtype), manifold=self)  # type: ignore[call-arg]

    def check_point(self, x: Tensor, *, explain: bool = False) -> Any:
        """Returns whether a tensor has a shape and dtype of frames; with `explain`, also the reason why not."""
        check_tensors("Stiefel", x)
        ok, reason = self._check_shape(x.shape, "x")
        if ok and x.dtype not in DTYPES:
            ok, reason = False, wrong_dtype(x.dtype)
        return (ok, reason) if explain else ok

    def assert_check_point(self, x: Tensor) -> None:
        """Raises ShapeError or DtypeError unless a tensor has a shape and dtype of frames."""
        check_tensors("Stiefel", x)
        self._assert_check_shape(x.shape, "x")
        self._assert_dtype(x.dtype)

    def assert_check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> None:
        """Raises NotAFrameError, ShapeError or DtypeError unless X is a frame."""
        self.assert_check_point(x)
        ok, reason = self._check_point_on_manifold(x, atol=atol, rtol=rtol)
        if not ok:
            raise NotAFrameError(f"Stiefel needs orthonormal columns, got {reason}; projx gives the nearest frame.")

    def _assert_check_shape(self, shape: tuple[int, ...], name: str) -> None:
        ok, reason = self._check_shape(shape, name)
        if not ok:
            raise ShapeError(reason)

    def _assert_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise DtypeError(wrong_dtype(dtype))

    def _check_shape(self, shape: tuple[int, ...], name: str) -> tuple[bool, str | None]:
        if len(shape) >= 2 and shape[-2] >= shape[-1] >= 1:
            return True, None
        remedy = "; take the transpose" if len(shape) >= 2 and shape[-2] < shape[-1] else ""
        return False, f"Stiefel needs `{name}` of shape (*, n, p), n >= p >= 1, got {tuple(shape)}{remedy}."

    def _check_point_on_manifold(self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5) -> tuple[bool, str | None]:
        if x.dtype not in DTYPES:
            return False, wrong_dtype(x.dtype)
        error = orthogonality_error(x)
        return judged("||W^H W - I||_F", error, torch.full_like(error, atol + rtol * x.shape[-1] ** 0.5))

    def _check_vector_on_tangent(
        self, x: Tensor, u: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5
    ) -> tuple[bool, str | None]:
        w, wide = torch.broadcast_tensors(*widened(x.detach(), u.detach()))
        s = w.mH @ wide
        permitted = atol + rtol * torch.linalg.matrix_norm(wide)
        return judged("||W^H U + U^H W||_F", torch.linalg.matrix_norm(s + s.mH), permitted)
