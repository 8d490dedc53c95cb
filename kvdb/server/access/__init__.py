"""Who may come in, and how what they say is kept from others."""
