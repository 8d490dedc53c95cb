"""`kvdb demo`: a trained model answers questions about a long document whose KV cache lives in a kvdb server."""
