"""Races of implementations on the user's own machine."""
