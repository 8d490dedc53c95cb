"""Pages of tokens with representatives: a search scores the representatives, and reads the pages that matter."""
