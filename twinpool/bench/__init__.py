"""Measurements of a deployment or of its parts, each started and stopped by the measurement itself."""
