"""One database in this process: every call on it, and what it is made of."""

from kvdb.database.database import Database as Database
