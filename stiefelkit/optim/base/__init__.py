"""What the optimizers of frames share."""
