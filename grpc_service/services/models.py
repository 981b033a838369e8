"""Models of triolet.v1: which models there are, loading and unloading them.

Rule: a handler decodes the request, calls the engine, and encodes the answer. Every end other than
success is an exception, which `grpc_service.access.interceptor` turns into a status.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpc_service._generated.triolet.v1 import models_pb2
from grpc_service.services import operations_codec, snapshots_codec

if TYPE_CHECKING:
    from grpc_service.access.rpc_record import Rpc
    from grpc_service.services.backend import Backend


class Models:
    """Lists, loads and unloads models and adapters (models.proto). Adapters are loaded from below
    ``adapter_root`` only; "": from nowhere."""

    def __init__(self, backend: Backend, adapter_root: str = "") -> None:
        self._backend = backend
        self._adapter_root = adapter_root

    async def ListModels(
        self, request: models_pb2.ListModelsRequest, rpc: Rpc
    ) -> models_pb2.ListModelsResponse:
        """Return every configured model. Never waits."""
        statuses = self._backend.engine.list_models()
        return models_pb2.ListModelsResponse(models=map(snapshots_codec.encode_model, statuses))

    async def GetModel(
        self, request: models_pb2.GetModelRequest, rpc: Rpc
    ) -> models_pb2.GetModelResponse:
        """Return one model. Never waits."""
        name = operations_codec.decode_name(request)
        status = self._backend.engine.get_model(name)
        return models_pb2.GetModelResponse(model=snapshots_codec.encode_model(status))

    async def LoadModel(self, request: models_pb2.LoadModelRequest, rpc: Rpc) -> None:
        """Load a model, and stream the stages of the load.

        Cancellation: ends only the watching; the load goes on, because it is the server's.
        """
        name, replicas = operations_codec.decode_load(request)
        watch = self._backend.engine.watch_load(name, replicas)
        while (status := await watch.next()) is not None:
            await rpc.call.write(operations_codec.encode_load(status))

    async def UnloadModel(
        self, request: models_pb2.UnloadModelRequest, rpc: Rpc
    ) -> models_pb2.UnloadModelResponse:
        """Take a model out of memory, and answer when that is done.

        Cancellation: ends the wait; the unload goes on.
        """
        name = operations_codec.decode_name(request)
        drain_s = operations_codec.decode_seconds(request, "drain")
        await self._backend.engine.unload_model(name, drain_s)
        return models_pb2.UnloadModelResponse()

    async def LoadAdapter(
        self, request: models_pb2.LoadAdapterRequest, rpc: Rpc
    ) -> models_pb2.LoadAdapterResponse:
        """Load an adapter, and answer when every replica of its base has it.

        Cancellation: nothing changes.
        """
        given = operations_codec.decode_load_adapter(request, self._adapter_root)
        name, directory, aliases = given
        status = await self._backend.engine.adapters.load(name, directory, aliases=aliases)
        return models_pb2.LoadAdapterResponse(model=snapshots_codec.encode_model(status))

    async def UnloadAdapter(
        self, request: models_pb2.UnloadAdapterRequest, rpc: Rpc
    ) -> models_pb2.UnloadAdapterResponse:
        """Forget an adapter, and answer when its memory is free.

        Cancellation: ends the wait; the unload goes on.
        """
        name = operations_codec.decode_name(request)
        drain_s = operations_codec.decode_seconds(request, "drain")
        await self._backend.engine.adapters.unload(name, drain_s)
        return models_pb2.UnloadAdapterResponse()
