"""The geometry of the Stiefel manifold: tangent vectors, steps, geodesics, logarithms, Hessians."""
