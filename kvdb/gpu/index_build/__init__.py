"""Index building on a device: exact nearest neighbours and k-means."""
