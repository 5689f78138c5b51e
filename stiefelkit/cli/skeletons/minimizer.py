"""Steepest descent with a line search: an optimizer of deterministic losses to begin with."""

from stiefelkit.optim import Minimizer
from stiefelkit.optim.deterministic.line_search import Wolfe, search
from stiefelkit.optim.deterministic.minimizer import OF_ALL


class Skeleton(Minimizer):
    """Goes against the gradient, to a point of the Wolfe conditions."""

    settings = OF_ALL

    def iterate(self, objective, here, memory):
        """From one position to the next, or None where nothing is to be gained."""
        t = memory.get("step", 0.1 / here.norm)
        trial = search(objective, here, -here.gradient, -(here.norm**2), t, Wolfe(1e-4, 0.9))
        if trial is None:
            return None
        memory["step"] = trial.t
        return objective.settled(trial.place, trial.position)
