"""Which of the calls that wait for the engine goes next, and how many may wait."""
