"""Which segments become one, and how views change with them."""
