"""How orthogonality fares under many optimizer steps."""
