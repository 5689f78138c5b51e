"""Time of the scan, forward and backward, in the seven cases of `stiefelkit bench scan`, over that of its LIMIT."""

from benchmarks.suite import PLACES, Suite, patience, row_of
from stiefelkit.measuring.plans import CASES, ScanRace
from stiefelkit.measuring.scan import LOSSES, races
from stiefelkit.scan import BACKENDS


class Scan(Suite, track="time"):
    """A backend in a case: dL/dh at every step, or that of the last state alone."""

    unit = "LIMIT"
    axes = (tuple(CASES), BACKENDS, LOSSES, tuple(PLACES))
    param_names = ("case", "backend", "loss", "device")

    def level(self, *cell: str) -> str:
        case, backend, loss, device = cell
        if device == "cpu" and (backend != "auto" or case in ("E", "F")):
            return "full"
        return "quick" if loss == LOSSES[0] or case == "A" else "full"

    def measure(self, *cell: str) -> float:
        case, backend, loss, device = cell
        plan = ScanRace(cases=(CASES[case],), backends=(backend,), device=device, **patience())
        (race,) = races(plan)
        name = f"scan ({backend})" + (", last state" if loss == LOSSES[1] else "")
        return row_of(race, name)["limit_units"]
