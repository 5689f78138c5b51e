"""Time of the scan, forward and backward, in the four cases of `stiefelkit bench scan`, over that of its LIMIT."""

from benchmarks.suite import PLACES, Suite, patience, row_of
from stiefelkit.measuring.races.scan import LOSSES, heats
from stiefelkit.measuring.races.scan_cases import CASES
from stiefelkit.measuring.races.scan_plan import ScanRace
from stiefelkit.scan import BACKENDS


class Scan(Suite):
    """A backend in a case: dL/dh at every step, or that of the last state alone."""

    unit = "LIMIT"
    axes = (tuple(CASES), BACKENDS, LOSSES, tuple(PLACES))
    param_names = ("case", "backend", "loss", "device")

    def level(self, *cell: str) -> str:
        case, backend, loss, device = cell
        if device == "cpu" and backend != "auto":
            return "full"
        return "quick" if loss == LOSSES[0] or case == "A" else "full"

    def measure(self, *cell: str) -> float:
        case, backend, loss, device = cell
        plan = ScanRace(cases=(CASES[case],), backends=(backend,), device=device, **patience())
        (heat,) = heats(plan)
        name = f"scan ({backend})" + (", last state" if loss == LOSSES[1] else "")
        return row_of(heat, heat.rows, name).limit_units

    def track_time(self, *cell: str) -> float:
        return self.figure
