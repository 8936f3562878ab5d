"""`dendro tune`: finds the shapes that suit a target, its drafters and a machine."""
