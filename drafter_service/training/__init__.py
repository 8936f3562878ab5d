"""Training of a drafter: the parallel scans, the losses against a teacher, and a loop that can be killed."""
