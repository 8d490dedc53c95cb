"""Contexts by name, the trees in which prompts find what is stored, and how long it stays where."""
