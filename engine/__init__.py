"""The phase-free inference engine that serves both pools."""
