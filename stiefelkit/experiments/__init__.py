"""Tasks, the training loop, comparisons, the drift experiment and their figures, and races."""
