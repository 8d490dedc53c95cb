"""Names, the trees in which prompts find what is stored, and how long it is kept."""
