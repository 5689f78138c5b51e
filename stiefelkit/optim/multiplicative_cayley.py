"""The multiplicative Cayley update, and RMSprop for everything else."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit.functional import Tangent, riemannian_gradient
from stiefelkit.functional._stiefel.tangents import SIDES
from stiefelkit.optim.bucket import Bucket
from stiefelkit.optim.checks import check_choice, check_number
from stiefelkit.optim.frame_optimizer import FrameOptimizer

__all__ = ["MultiplicativeCayley"]

PRECONDITIONS = (None, "rmsprop")
GRADIENTS = ("exact", "reference")


class MultiplicativeCayley(FrameOptimizer):
    r"""Moves frames by W <- (I + lr/2 B)^-1 (I - lr/2 B) W, B = G W^H - W G^H; other groups by RMSprop.

    B W is the Riemannian gradient in the canonical metric, and the update its Cayley retraction. It is computed in
    p x p matrices only, by four n x p x p products for a tall frame or four n x n x n for a square one at steps
    lr ||B||_2 <= 0.1, two more beyond. In the euclidean metric, "stiefel:euclidean", the part of B within the columns
    of W counts half.

    Args:
        params: groups, as `sk.optim.parameter_groups` gives them.
        lr: learning rate; that of frames is best given to their group, `stiefel=dict(lr=1e-4)`.
        precondition: "rmsprop" divides each entry of G by the root of its mean square before it is projected, real and
            imaginary parts apart, as the paper does on pixel-by-pixel MNIST. None does not.
        alpha: decay of the mean squares, for frames and others.
        eps: added to their roots.
        momentum: factor of the last direction, which for frames is brought along by projection on the tangent space.
        weight_decay: of the groups without a manifold.
        centered: of the groups without a manifold, as in torch.optim.RMSprop.
        gradient: "exact", or "reference": the half of it that the authors' code uses, the sum over time of
            dL/dy_t Re(h_t)^T instead of dL/dy_t h_t^H, y_t = W h_t. The complex `sk.nn.OrthogonalRNN` that the frame is
            the recurrent weight of leaves out the other half from then on, until another optimizer takes the frame.
        side: "left" is the formula above. "right" is W <- W (I + lr/2 B)^-1 (I - lr/2 B), B = W^H G - G^H W: the same
            step for a square frame, and for a tall one a rotation within the span of its columns.
        precision: "exact" or "fast", see `FrameOptimizer`.
        foreach: of the groups without a manifold.
        maximize: ascend instead.

    Raises:
        OptionError: a setting is out of range.
        ShapeError, NotAFrameError: a parameter of a manifold is no frame.
        OptimizerError: a frame stands in a group without a manifold, or is none whose gradient can be halved.

    References:
        Wisdom, Powers, Hershey, Le Roux, Atlas, Full-capacity unitary recurrent neural networks, NIPS 2016.
        Wen, Yin, A feasible method for optimization with orthogonality constraints, 2013.

    >>> import stiefelkit as sk
    >>> layer = sk.orthogonal(torch.nn.Linear(4, 4), "weight", "stiefel")
    >>> optimizer = MultiplicativeCayley(sk.optim.parameter_groups(layer, lr=1e-3, stiefel=dict(lr=1e-2)))
    >>> layer(torch.ones(4)).square().sum().backward()
    >>> optimizer.step()
    """

    plain: ClassVar[type[torch.optim.Optimizer]] = torch.optim.RMSprop

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        precondition: str | None = None,
        alpha: float = 0.9,
        eps: float = 1e-8,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        centered: bool = False,
        gradient: str = "exact",
        side: str = "left",
        precision: str = "exact",
        foreach: bool | None = None,
        maximize: bool = False,
    ):
        own = dict(
            lr=lr,
            precondition=precondition,
            alpha=alpha,
            eps=eps,
            momentum=momentum,
            weight_decay=weight_decay,
            centered=centered,
            gradient=gradient,
            side=side,
            precision=precision,
            foreach=foreach,
            maximize=maximize,
        )
        super().__init__(params, own)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        name = type(self).__name__
        check_number(name, group, "alpha", below=1.0)
        check_number(name, group, "eps")
        check_number(name, group, "momentum")
        check_choice(name, group, "precondition", PRECONDITIONS)
        check_choice(name, group, "side", SIDES)
        check_choice(name, group, "gradient", GRADIENTS)

    def _direction(self, group: dict[str, Any], bucket: Bucket, w: Tensor, g: Tensor) -> tuple[Tangent, list[float]]:
        metric = group["manifold"].partition(":")[2]
        if group["precondition"]:
            g, squares = _preconditioned(g, bucket.state("square_avg"), group["alpha"], group["eps"])
            bucket.stage("square_avg", squares)
        if group["momentum"]:
            g = g.add(bucket.state("momentum_buffer"), alpha=group["momentum"])
        direction = riemannian_gradient(w, g, metric, side=group["side"])
        if group["momentum"]:
            bucket.stage("momentum_buffer", direction.covector(w, metric))
        return direction, [float(group["lr"])] * len(direction.rotation_norms)


def _preconditioned(g: Tensor, squares: Tensor, alpha: float, eps: float) -> tuple[Tensor, Tensor]:
    """G over the root of the mean square of its entries, and the mean squares: complex numbers, too, of a complex G.

    Raises:
        OverflowError: a mean square is not finite.
    """
    if not g.is_complex():
        squares = squares.mul(alpha).addcmul_(g, g, value=1 - alpha)
        if not torch.isfinite(squares).all():
            raise OverflowError
        return g / squares.sqrt().add_(eps), squares
    scaled, found = _preconditioned(_parts(g), _parts(squares), alpha, eps)
    return torch.view_as_complex(scaled), torch.view_as_complex(found)


def _parts(t: Tensor) -> Tensor:
    return torch.view_as_real(t.resolve_conj().contiguous())
