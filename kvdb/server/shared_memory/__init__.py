"""The service for clients on the same host, through memory that it shares with each of them."""
