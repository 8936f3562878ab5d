"""`dendro certify`: the promises checked on the running system, and the checks against planted faults."""
