"""The way to a server on the same host that leads through shared memory."""
