"""Tenants: whose call it is, by its credential, and what of the database it may see."""
