"""The client for asyncio. It makes the same messages as the other one, and differs in how they are sent."""
