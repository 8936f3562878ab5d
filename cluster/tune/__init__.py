"""`dendro tune`: finds the shapes that suit a target, its drafter and a machine."""
