"""The plan of the race of the scan. Read for help, so torch comes in functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stiefelkit.errors import OptionError
from stiefelkit.measuring.races.plan import WHO, Rules
from stiefelkit.measuring.races.scan_cases import CASES, ScanCase, cases_of, read_case
from stiefelkit.training.checks import known_words

if TYPE_CHECKING:
    from stiefelkit.measuring.races.recurrence_problem import Sequences

__all__ = ["ScanRace"]

DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class ScanRace(Rules):
    """Which recurrences race.

    Args:
        cases: out of A to G, separated by commas; of A, B, C and D all that the activation can do if left out.
        case: sizes of your own, T=784,n=170,B=128,m=1, with "complex" behind them if states are; races alone, or after
            --cases.
        activation: of the scan and of the loop.
        backends: of the scan, separated by commas, and "factors", W in factors in E, F and G; all fast ones that can do
            the case if left out.
        peers: race the eager loop, torch's RNN and LSTM.
        named_peers: the peers that race, whether all are asked for or not; all if empty and asked for.
        memory: measure peak memory too, each contender in a process of its own, a few seconds each.
        training_step: time a whole training step of scornn too, in the first real case, and the scan within it.
        dtype: float32 or float64; complex states are complex64 or complex128.
    """

    cases: tuple[ScanCase, ...] = field(default=(), metadata={"read": cases_of})
    case: tuple[ScanCase, ...] = field(default=(), metadata={"read": lambda words: (read_case(words),) * bool(words)})
    activation: str = "modrelu"
    backends: tuple[str, ...] = ()
    peers: bool = False
    named_peers: tuple[str, ...] = field(default=(), metadata={"hidden": True})
    memory: bool = False
    training_step: bool = False
    dtype: str = "float32"
    repeats: int = 30
    seconds: float = 4.0

    def __post_init__(self) -> None:
        from stiefelkit.measuring.races.recurrences import FACTORS, recurrence_peers
        from stiefelkit.scan import BACKENDS, find_activation

        super().__post_init__()
        known_words(WHO, "dtype", [self.dtype], DTYPES)
        known_words(WHO, "backend", self.backends, (*BACKENDS, FACTORS))
        known_words(WHO, "peer", self.named_peers, recurrence_peers.names())
        of_complex = find_activation(self.activation, False).of_complex()
        able = [case for case in CASES.values() if not case.map and (not case.is_complex or of_complex)]
        object.__setattr__(self, "cases", (*self.cases, *self.case) or tuple(able))
        object.__setattr__(self, "case", ())
        for case in self.cases:
            find_activation(self.activation, case.is_complex)
        if self.training_step:
            if self.dtype != "float32" or self.activation != "modrelu":
                raise OptionError(
                    f"{WHO} needs float32 and modrelu for the training step, got {self.dtype}, {self.activation}."
                )
            if all(case.is_complex for case in self.cases):
                raise OptionError(f"{WHO} needs a real case for the training step, got complex ones only.")

    def drawn(self, case: ScanCase) -> Sequences:
        """Returns the tensors of a case."""
        import torch

        from stiefelkit.measuring.races.recurrence_problem import Sequences

        return Sequences(case, self.activation, getattr(torch, self.dtype), torch.device(self.device), self.seed)
