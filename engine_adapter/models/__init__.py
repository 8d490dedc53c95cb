"""Models that come with kvdb."""
