"""One page about the machine at hand: drift, times, growth, errors at large coordinates, and the scan."""
