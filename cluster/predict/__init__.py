"""`dendro predict`: what each configured arm should give over no speculation on a machine."""
