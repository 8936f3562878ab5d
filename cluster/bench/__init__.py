"""`dendro bench`: what is compared runs side by side, interleaved, and every bar is judged from the printed rows."""
