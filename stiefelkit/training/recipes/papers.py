"""Options by which the optimizers of papers differ from torch's."""

from stiefelkit.training.recipes import Option

__all__ = ["ADAGRAD", "AUTHORS_ADAGRAD", "AUTHORS_RMSPROP", "TENSORFLOW_RMSPROP", "THEANO_RMSPROP"]

TENSORFLOW_RMSPROP: dict[str, Option] = {"alpha": 0.9, "eps": 1e-10, "init_acc": 1, "eps_inside": True}
"""TensorFlow 1: epsilon under the root, mean squares that begin at one, which makes for a slow start."""
THEANO_RMSPROP: dict[str, Option] = {"alpha": 0.9, "eps": 0.0, "init_acc": 1e-3}
"""That of the uRNNs' authors: no epsilon, mean squares that begin at a thousandth."""
AUTHORS_RMSPROP: dict[str, Option] = {"alpha": 0.9, "eps": 1e-8, "eps_inside": True}
"""That of scuRNN's authors, for A: as TensorFlow's, but from zero."""
ADAGRAD: dict[str, Option] = {"initial_accumulator_value": 0.1}
"""TensorFlow 1's."""
AUTHORS_ADAGRAD: dict[str, Option] = {"eps": 1e-8}
"""That of scuRNN's authors, for A: from zero."""
