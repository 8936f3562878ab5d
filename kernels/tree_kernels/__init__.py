"""Tensors in, tensors out: each operation in a folder of its own, its plain reference first. Imports none of ours."""
