"""Pages of tokens, found by what represents them: a search scores the representatives and reads the pages that matter."""
