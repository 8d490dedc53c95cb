"""HTTP beside gRPC: whether the server is well, what it measures, and pages to look at. Nothing can be changed through it."""
