"""Measuring this machine and what runs on it: races, drift, and a page about them all."""
