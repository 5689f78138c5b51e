"""Tasks, recipes, the training loop, its log and figures, comparisons, and gradients over time."""
