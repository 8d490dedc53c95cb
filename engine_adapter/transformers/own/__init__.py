"""Models that attend themselves: kvdb stores what their own caches hold, finds it, and hands it back.

They stand beside the models whose attention kvdb answers (`engine_adapter.transformers.cache`); `attach` says which is which.
"""
