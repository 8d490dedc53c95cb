"""Selectors say which tokens are most worth keeping: `base` is the protocol, `registry` has them by name, each is one file."""
