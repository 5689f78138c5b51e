"""Programs for GPUs, and what launches them."""
