"""Layers of models, and their memory: what several services build on. Imports the kernels alone."""
