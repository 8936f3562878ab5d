"""Few rows times a weight, with a norm before and a sum after it (README.md in this folder)."""
