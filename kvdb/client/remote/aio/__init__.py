"""The connection for asyncio: what the other one does, where it waits it lets the event loop go on."""
