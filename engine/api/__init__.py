"""What programs call: the engine for Trio, for threads that block, and for asyncio."""
