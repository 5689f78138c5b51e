"""The contract of a parametrization: base class, table of names, maps around other maps, and views of weights."""
