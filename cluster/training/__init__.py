"""`dendro train drafter`: a drafter for a target of a configuration, and the parts that the demo's training shares."""
