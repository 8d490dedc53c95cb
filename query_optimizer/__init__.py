"""Decides which access path answers a query. It sees only numbers: no arrays, blocks or sessions."""
