"""The kinds of work that the engine does, one file for each.

A kind joins its core (`engine.core`), its runner's interface (`engine.worker.interface`), and the
streams and the preparation of its requests (`engine.requests`). The loop, the replica, the pool and
the supervisor know kinds only by two protocols, `engine.replica.replica.ReplicaKind` and
`engine.requests.kind.RequestKind`.
"""
