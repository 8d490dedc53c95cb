"""The GPU: whether there is one, copies of blocks in its memory, and queries answered there. Only `probe`, `opening`, `interface`
and `mirror` may be imported without torch; everything else is imported when a configuration asks for a GPU."""
