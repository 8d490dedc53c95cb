"""Which access path answers a query. Sees numbers only: nothing of arrays, blocks or sessions."""
