"""The demo pair: its text, training, measurements and checkpoints, all made by commands that any user can run."""
