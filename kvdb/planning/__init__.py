"""Facts in, a prepared plan out: what the optimizer is told of a call, and how its plan divides what is read."""
