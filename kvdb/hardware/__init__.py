"""What this machine is, and how fast: measured once, kept in a file, read by the optimizer."""
