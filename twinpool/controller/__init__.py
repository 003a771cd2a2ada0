"""Keeps the pools at their sizes: on this machine, or on a Ray cluster."""
