"""The KV pool and the prefix cache, and the slots of states."""
