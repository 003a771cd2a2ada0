"""Operators: the torch reference is the specification; Triton (GPU) and C++ (CPU) are checked against it."""
