"""One open session: its layers, its tail, its queries, and steps of several sessions at once."""
