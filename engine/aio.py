"""The engine for asyncio programs, by its public name: ``import engine.aio``.

It is a module of its own because importing asyncio takes longer than importing the rest of
`engine`, and a server or a worker process never needs asyncio.
"""

from engine.api.aio import Chat, CrossEncoder, Encoder, Engine, Stream, open_engine

__all__ = ["Chat", "CrossEncoder", "Encoder", "Engine", "Stream", "open_engine"]
