"""What of a segment is most worth keeping: `base` is the protocol, `registry` the selectors by name, and each is one file."""
