"""Races of implementations on the user's own machine."""

WHO = "The race"
"""The name that errors begin with."""
