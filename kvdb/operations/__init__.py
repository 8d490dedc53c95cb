"""What a database is asked of stored contexts and their indexes, without a session."""
