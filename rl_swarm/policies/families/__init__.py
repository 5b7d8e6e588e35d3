"""The model families of the stacked decoder: one module for each style of block."""
