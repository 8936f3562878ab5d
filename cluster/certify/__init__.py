"""`dendro certify`: the promises, checked on the running system, and the checks themselves checked against planted faults."""
