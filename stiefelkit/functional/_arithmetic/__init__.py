"""Products, norms and float64 at full precision on every device."""
