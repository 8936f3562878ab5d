"""Operations on tensors. Each has a folder with a plain reference. Imports no other package of this project."""
