"""vllm.grpc.engine.VllmEngine, the service by which the gateway smg uses a server as a worker: one
port for each model. It needs the protos of the extra ``smg``."""
