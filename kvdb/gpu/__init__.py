"""The GPU: what is there of it, copies of blocks in its memory, and queries answered there. Nothing here is imported before a
configuration asks for a GPU, but for what looks whether there is one."""
