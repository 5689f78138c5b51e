"""How time and memory grow."""
