"""Tests of the folders of the same names; in this folder itself, tests of the whole repository, and commands that are
run by hand: `python -m tests.soak`. A package, so that no other package named `tests` is found instead."""
