"""The plan of a report, and the commands that measure each part alone. Read for help, without torch."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

from cyclopts import Parameter

from stiefelkit.errors import OptionError
from stiefelkit.measuring.drift.plan import UNCONSTRAINED, DriftPlan
from stiefelkit.measuring.races.plan import WIDE_DTYPES, GrowthPlan, NormPlan, ParametrizationRace, ScanRace, Site
from stiefelkit.training.checks import known_parametrizations, known_words, listed

SUBJECT = "The report"
SECTIONS = {
    "drift": "drift",
    "time": "bench parametrizations",
    "growth": "bench growth",
    "norms": "bench norms",
    "scan": "bench scan",
}
"""Section to the command that measures it alone, in the order of measurement."""

Scale = Mapping[str, Mapping[str, Any]]
"""Section to fields of its plan, which say how much is measured."""
SQUARES = ((64, 64), (128, 128), (256, 256), (512, 512))
USUAL: Scale = {
    "drift": {"steps": 1000, "look_every": 2},
    "time": {"sizes": SQUARES, "repeats": 8, "seconds": 0.2, "precisions": ("exact",)},
    "growth": {"repeats": 8, "seconds": 0.1},
    "norms": {"precisions": ("exact",)},
    "scan": {"repeats": 3, "seconds": 0.3},
}
"""A few minutes on two cores."""
QUICK: Scale = USUAL | {
    "time": {**USUAL["time"], "sizes": SQUARES[:3]},
    "growth": {
        **USUAL["growth"],
        "what": ("time",),
        "against": ("n", "T"),
        "sizes": (64, 128, 256),
        "steps": (64, 256),
    },
    "scan": {**USUAL["scan"], "quick": True},
}
"""Under a minute: as much of it as fits."""
SHARES = {"drift": 3, "time": 4, "growth": 4, "norms": 1, "scan": 3}
"""Section to its part of the time of a quick report."""
FULL: Scale = {
    "drift": {"steps": 10_000, "look_every": 10},
    "time": {"sizes": (*SQUARES, (1024, 1024)), "repeats": 50, "seconds": 1.0},
    "growth": {"sizes": (64, 128, 256, 512, 1024, 2048)},
    "scan": {"memory": True},
}
"""Most of an hour on two cores."""


@dataclass(frozen=True)
class ReportPlan(Site):
    """The sections of a report, and the parametrizations in them.

    Args:
        full: more steps, sizes and samples: most of an hour on two cores, instead of a few minutes.
        parametrizations: names, separated by commas; all if left out.
        sections: some of drift, time, growth, norms and scan, separated by commas; all if left out.
        peers: measure other implementations too.
        dtype: float32, float64, complex64 or complex128; maps that are complex only are measured as such.
        scale: how much of each; that of `full` or `quick` if left out.
    """

    full: bool = False
    parametrizations: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    peers: bool = True
    dtype: str = "float32"
    scale: Annotated[Scale | None, Parameter(parse=False)] = None

    subject: ClassVar[str] = SUBJECT

    def __post_init__(self) -> None:
        super().__post_init__()
        known_parametrizations(self.parametrizations)
        known_words(SUBJECT, "section", self.sections, SECTIONS)
        known_words(SUBJECT, "dtype", [self.dtype], WIDE_DTYPES)
        if self.full and self.quick:
            raise OptionError(f"{SUBJECT} needs --full or --quick, got both.")
        if not self.sections:
            object.__setattr__(self, "sections", tuple(SECTIONS))
        if not any(self.groups().values()):
            raise OptionError(f"{SUBJECT} needs a parametrization that does {self.dtype}, got none.")

    def groups(self) -> dict[str, tuple[str, ...]]:
        """Returns dtype to the parametrizations measured in it: the plan's own, or the complex one that some need."""
        import torch

        from stiefelkit.measuring.races.contenders import dtype_of
        from stiefelkit.weights.attach import available

        groups: dict[str, tuple[str, ...]] = {}
        for name, cls in available().items():
            if not self.parametrizations or name in self.parametrizations:
                chosen = str(dtype_of(cls, getattr(torch, self.dtype))).removeprefix("torch.")
                groups[chosen] = (*groups.get(chosen, ()), name)
        return groups

    def elsewhere(self) -> set[str]:
        """Returns the parametrizations that are measured in another dtype than the plan's own."""
        return {name for dtype, names in self.groups().items() if dtype != self.dtype for name in names}

    def plans(self, section: str) -> list[Any]:
        """Returns the plans of a section: one for each dtype in which parametrizations are measured."""
        scale = self.scale or (FULL if self.full else QUICK if self.quick else USUAL)
        rules = {"device": self.device, "threads": self.threads, "seed": self.seed, **scale.get(section, {})}
        if section == "growth":
            return [GrowthPlan(parametrizations=self.parametrizations, dtype=self.dtype, **rules)]
        if section == "scan":
            dtype = "float64" if self.dtype in ("float64", "complex128") else "float32"
            return [ScanRace(peers=self.peers, dtype=dtype, **rules)]
        if section == "drift":
            rules = {"gradients": "rotation", "step_length": 0.1, **rules}
            return [DriftPlan(methods=methods, dtype=dtype, **rules) for dtype, methods in self._methods()]
        make = partial(ParametrizationRace, operations=("forward_backward",)) if section == "time" else NormPlan
        plans = []
        for dtype, names in self.groups().items():
            named = () if dtype == self.dtype and not self.parametrizations else names
            peers = self.peers and dtype == self.dtype
            plans.append(make(**{"dtype": dtype, "parametrizations": named, "peers": peers, **rules}))
        return plans

    def commands(self, section: str) -> list[str]:
        """Returns the command lines that measure one section alone, in no quick form."""
        return [command(SECTIONS[section], plan) for plan in self.plans(section)]

    def _methods(self) -> list[tuple[str, tuple[str, ...]]]:
        """Returns dtypes and the methods whose drift is measured in each: maps, and in the own dtype optimizers."""
        from stiefelkit.measuring.moved_frames import peer_optimizers
        from stiefelkit.weights.attach import available

        pairs = []
        for dtype, names in self.groups().items():
            able = DriftPlan(dtype=dtype).methods
            methods = tuple(name for name in names if name in able)
            if dtype == self.dtype:
                with_frames = len(methods) < len(names)
                others = [name for name in able if name not in available()]
                others = [name for name in others if self.peers or name not in peer_optimizers.names()]
                methods += tuple(name for name in others if with_frames or name == UNCONSTRAINED)
                if not self.parametrizations and self.peers:
                    methods = ()  # all that there are; those of another group refuse, and are measured there
            if methods or not self.parametrizations:
                pairs.append((dtype, methods))
        return pairs


def command(words: str, plan: Any, **more: Any) -> str:
    """Returns the command line of a plan, not in its quick form, with further options."""
    own: dict[str, Any] = {"dtype": plan.dtype} if isinstance(plan, DriftPlan) else {}
    usual = vars(type(plan)(**own, quick=plan.quick))
    fields = {name: value for name, value in vars(plan).items() if name != "dtype" and value != usual.get(name)}
    fields |= {} if plan.dtype == "float32" else {"dtype": plan.dtype}
    options = [word for name, value in (fields | more).items() for word in _option(name, value)]
    return shlex.join(["stiefelkit", *words.split(), *options])


def _option(name: str, value: Any) -> list[str]:
    option = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [option if value else f"--no-{option[2:]}"]
    return [option, listed(value if isinstance(value, tuple) else (value,))]
