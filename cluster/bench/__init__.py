"""`dendro bench`: contenders are measured interleaved in one run, and every aim is judged from the reported rows."""
