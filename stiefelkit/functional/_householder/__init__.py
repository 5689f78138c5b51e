"""Products of Householder reflectors, and the reflectors of a frame."""
