"""Training of a drafter: the parallel scans, the losses against a teacher, and a resumable loop."""
