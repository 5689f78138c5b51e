"""Time of the scan, forward and backward, in the seven cases of `stiefelkit bench scan`, over that of its LIMIT."""

from benchmarks.suite import PLACES, PRODUCTS, Suite, of_race, patience, row_of
from stiefelkit.measuring.races.plan import ScanRace
from stiefelkit.measuring.races.scan import LOSSES, races
from stiefelkit.measuring.races.scan_cases import CASES
from stiefelkit.scan import BACKENDS

TIMES = {"": 0.5, "ours": 0.8, "last": 1.1, "rotation_rnn": 1.3, "reference": 1.3, "eager_loop": 1.3, "torch_rnn": 1.0}
"""Times of its products: LIMIT, our scan, and other recurrences."""
OF_GATES = 3.5
"""The same for what is not named there: layers with gates, which multiply by three or four matrices."""


def forward_backward(case: str, what: str = "") -> float:
    """Predicted seconds of LIMIT in a case, or of a recurrence by its name."""
    sizes = CASES[case]
    n = sizes.n * (1 + sizes.is_complex)
    return TIMES.get(what, OF_GATES) * 6 * sizes.T * sizes.B * n * n / PRODUCTS


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

    def predicted(self, named: str, *cell: str) -> float:
        ours = "reference" if cell[1] == "reference" else "ours"
        return of_race(named, [forward_backward(cell[0], what) for what in ("", ours, "last")])

    def measure(self, *cell: str) -> float:
        case, backend, loss, device = cell
        plan = ScanRace(cases=(CASES[case],), backends=(backend,), device=device, **patience())
        (race,) = races(plan)
        name = f"scan ({backend})" + (", last state" if loss == LOSSES[1] else "")
        return row_of(race, name)["limit_units"]

    def track_time(self, *cell: str) -> float:
        return self.figure
