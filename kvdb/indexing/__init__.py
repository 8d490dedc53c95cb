"""Indexes over what is stored: when they pay, and the threads that build them."""
