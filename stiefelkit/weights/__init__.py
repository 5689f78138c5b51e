"""All that happens to a weight of a module, from `sk.orthogonal` to the checkpoint."""
