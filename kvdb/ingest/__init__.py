"""KV becomes a context: imports under way, and the publisher that makes contexts of them and of stored sessions."""
