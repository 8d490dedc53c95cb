"""Commands of `kvdb` that talk to a server."""
