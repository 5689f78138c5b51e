"""What a parametrization is: the base class, the table of names, the maps around others, and how a weight is read."""
