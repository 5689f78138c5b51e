"""One kernel for all steps, on CUDA devices."""

from stiefelkit.functional._scan.backends import Request

__all__ = ["reason_against"]


def reason_against(request: Request) -> str | None:
    """Why these kernels cannot run a scan; None if they can."""
    return f"a CUDA device, got {request.device.type}"
