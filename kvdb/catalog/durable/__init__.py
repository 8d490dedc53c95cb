"""The catalogue on the disk: an SQLite database, and what is written before it names it."""
