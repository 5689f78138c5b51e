"""Speech, frame by frame: the task, its spectra, whose recordings are in which split, the quality of what is heard."""

from stiefelkit.training.tasks.speech.task import Speech

__all__ = ["Speech"]
