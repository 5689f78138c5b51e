"""Small matrices on a GPU: whole maps and steps as one program a matrix, and what launches them."""
