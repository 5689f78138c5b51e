"""Adapters of low rank: a rotation among the leading singular vectors of a weight, and frames around a diagonal."""

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stiefelkit.contract.param import Parametrization
from stiefelkit.contract.table import find_parametrization
from stiefelkit.errors import NonFiniteError, OptionError, needs
from stiefelkit.nn.adapter import Adapter, Rotation, identity_scheme
from stiefelkit.nn.frozen import Layout, attribute, beyond_one_matrix, inside_peft
from stiefelkit.nn.recurrent import require_options
from stiefelkit.numbers import as_python_number, integer
from stiefelkit.tensors import working_dtype


class _LowRank(Adapter):
    """An adapter that adds a matrix of low rank, computed in float32 or better, to what the layer gives."""

    def __init__(self, layer: nn.Module, name: str, rank: int, inner: Parametrization, options: dict[str, Any]):
        super().__init__(layer, name)
        kind = type(self)
        is_product = self._layout.inputs is not None and self._layout.dim == -1
        needs(is_product, OptionError, kind.__name__, "a layer that multiplies by a matrix", type(layer).__name__)
        n = min(self.in_features, self.out_features)
        self.rank = integer(1, n, "min(in_features, out_features)").require(kind.__name__, "rank", rank)
        require_options(kind, inner, options)

    @abstractmethod
    def added(self, x: Tensor) -> Tensor:
        """Returns what the adapter adds to the outputs, in its own dtype."""

    @abstractmethod
    def difference(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix of outputs by inputs that is added to the weight."""

    def changed(self, w: Tensor) -> Tensor:
        d = self.difference(w.dtype)
        return w + (d if self._layout.axes == Layout().axes else d.mT)

    def unmerged(self, x: Tensor, *args: object, **options: object) -> Tensor:
        y = self.layer(x, *args, **options)
        return y + self.added(x).to(y.dtype)


class PrincipalAdapter(_LowRank):
    """A frozen layer and a trained rotation among the leading r singular vectors of its weight (PSOFT).

    With :math:`U S V^T`, the r largest singular values of W and their vectors, W becomes
    :math:`W + U (diag(a) R diag(b) - I) S V^T`. R is an r x r rotation, and a and b are ones at first, so that the
    layer does exactly what it did. Trained are :math:`r (r - 1) / 2 + 2 r` numbers; where a and b stay ones, so do the
    angles between the columns of :math:`S V^T`, and the singular values of W. Costs a singular value decomposition.

    Args:
        layer: a linear layer, the `Conv1D` of transformers, or any other with a matrix of real numbers as its weight;
            its parameters require no gradient from then on.
        inner: the map of R, a registered name or a class.
        rank: r.
        diagonals: whether there are a and b.
        name: as in `OrthogonalAdapter`.
        **options: of the map of R.

    References:
        Wu, Hu, Min, Wang, Efficient orthogonal fine-tuning with principal subspace adaptation, ICLR 2026.

    >>> adapter = PrincipalAdapter(nn.Linear(8, 6), rank=3)
    >>> sum(p.numel() for p in adapter.parameters() if p.requires_grad)
    9
    """

    left: Tensor
    right: Tensor

    def __init__(
        self,
        layer: nn.Module,
        *,
        inner: Parametrization = "cayley",
        rank: int = 8,
        diagonals: bool = True,
        name: str = "default",
        **options: object,
    ):
        given = as_python_number(options)
        super().__init__(layer, name, rank, inner, given)
        found = beyond_one_matrix(inside_peft(self.base))
        needs(found is None, OptionError, "PrincipalAdapter", "singular vectors of a weight", found)
        w = attribute(layer, "weight")
        is_finite = w.is_meta or bool(w.isfinite().all())
        needs(is_finite, NonFiniteError, "PrincipalAdapter", "a finite weight", "NaN or infinity in it")
        with torch.no_grad():
            wide = w.detach().to(working_dtype(w.dtype))
            u, s, vh = torch.linalg.svd(wide if self._layout.axes == Layout().axes else wide.mT, full_matrices=False)
            left, right = u[:, : self.rank], s[: self.rank, None] * vh[: self.rank]
        self.register_buffer("left", left.contiguous().to(**self.factory))
        self.register_buffer("right", right.contiguous().to(**self.factory))
        start = identity_scheme(find_parametrization(inner), given)
        self.rotation = Rotation((self.rank, self.rank), inner, start, self.factory, given)
        ones = torch.ones(self.rank, **self.factory)
        self.after = nn.Parameter(ones) if diagonals else None
        self.before = nn.Parameter(ones.clone()) if diagonals else None
        self.layer.requires_grad_(False)

    def added(self, x: Tensor) -> Tensor:
        z = F.linear(x.to(self.right.dtype), self.right)
        y = self.rotation(z if self.before is None else self.before * z)
        return F.linear((y if self.after is None else self.after * y) - z, self.left)

    def difference(self, dtype: torch.dtype) -> Tensor:
        r = self.rotation.matrix.to(dtype)
        if self.before is not None and self.after is not None:
            r = self.after.to(dtype)[:, None] * r * self.before.to(dtype)
        return self.left.to(dtype) @ (r @ self.right.to(dtype) - self.right.to(dtype))


class LowRankAdapter(_LowRank):
    """A frozen layer and :math:`U diag(s) V^T` of rank r, with trained frames U and V; s is trained from zeros.

    W becomes :math:`W + U diag(s) V^T`, so that s has the singular values of the change, up to signs. The frames are
    kept by any map: by "stiefel" they are moved by an optimizer of frames (`sk.optim.parameter_groups`), by "cayley"
    and others any optimizer of torch trains their coordinates.

    Args:
        layer: a linear layer, the `Conv1D` of transformers, or any other with in_features and out_features, quantized
            ones too; its parameters require no gradient from then on.
        inner: the map of U and V, a registered name or a class.
        rank: r.
        init: a scheme of the map.
        name: as in `OrthogonalAdapter`.
        **options: of the map.

    >>> adapter = LowRankAdapter(nn.Linear(8, 6), rank=2)
    >>> sum(p.numel() for p in adapter.parameters() if p.requires_grad)
    30
    """

    def __init__(
        self,
        layer: nn.Module,
        *,
        inner: Parametrization = "stiefel",
        rank: int = 8,
        init: str = "haar",
        name: str = "default",
        **options: object,
    ):
        given = as_python_number(options)
        super().__init__(layer, name, rank, inner, given)
        self.left = Rotation((self.out_features, self.rank), inner, init, self.factory, given)
        self.right = Rotation((self.in_features, self.rank), inner, init, self.factory, given)
        self.spectrum = nn.Parameter(torch.zeros(self.rank, **self.factory))
        self.layer.requires_grad_(False)

    def added(self, x: Tensor) -> Tensor:
        u, v = self.left.weight, self.right.weight
        return F.linear(self.spectrum * F.linear(x.to(v.dtype), v.mT), u)

    def difference(self, dtype: torch.dtype) -> Tensor:
        return (self.left.weight.to(dtype) * self.spectrum.to(dtype)) @ self.right.weight.to(dtype).mT
