"""What was observed of queries and answers: statistics, audits, and how ways are proven."""
