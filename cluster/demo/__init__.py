"""The demo pair: its text, training, measurements and checkpoints. Any user can make all of them again."""
