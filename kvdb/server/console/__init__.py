"""The web console: pages for people, and what they show as JSON. It reads, and changes nothing."""
