"""How the gradient of the loss fares on its way back through time."""
