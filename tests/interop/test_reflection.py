"""Clients without our protos list and call services through either reflection service."""

import asyncio
import json

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2 as v1alpha_pb2
from grpc_reflection.v1alpha import reflection_pb2_grpc as v1alpha_pb2_grpc

from grpc_service._generated.grpc_reflection_v1 import reflection_pb2 as v1_pb2
from grpc_service._generated.grpc_reflection_v1 import reflection_pb2_grpc as v1_pb2_grpc
from grpc_service._generated.triolet.v1 import control_pb2
from grpc_service.app.health import SERVICE_NAME as HEALTH
from grpc_service.app.health import HealthServicer
from grpc_service.services.methods import SERVICE_NAMES as OURS
from grpc_service.services.reflection import SERVICE_NAMES
from tests.service.fake_backend import FakeBackend, serving

CONTROL = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name
LISTED = sorted([HEALTH, *OURS, *SERVICE_NAMES])
CALL_TIMEOUT_S = 60
VERSIONS = {"v1": (v1_pb2, v1_pb2_grpc), "v1alpha": (v1alpha_pb2, v1alpha_pb2_grpc)}

both_versions = pytest.mark.parametrize("version", VERSIONS)


def run(main):
    """Run `main(address)` beside a server of its own, on asyncio, which grpc.aio needs."""
    health = HealthServicer()
    health.set_states({"": True})

    async def bounded(address):
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await main(address)

    with serving(FakeBackend(), health) as (address, _token):
        return asyncio.run(bounded(address))


def curl(buf, version, path, *arguments):
    """Run `buf curl` with one reflection service as its only schema; return its output."""

    async def main(address):
        process = await asyncio.create_subprocess_exec(
            *(buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge"),
            *("--reflect-protocol", f"grpc-{version}", *arguments, f"http://{address}{path}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        stdout, stderr = await process.communicate()
        assert process.returncode == 0, stderr.decode()
        return stdout.decode()

    return run(main)


def ask(version, **request):
    """Send one reflection request from grpcio's client; return the answer."""
    messages, stubs = VERSIONS[version]

    async def main(address):
        async with grpc.aio.insecure_channel(address) as channel:
            question = messages.ServerReflectionRequest(**request)
            stub = stubs.ServerReflectionStub(channel)
            [answer] = [answer async for answer in stub.ServerReflectionInfo(iter([question]))]
            assert answer.original_request == question
            return answer

    return run(main)


def files_in(answer):
    """Return the descriptors in an answer, by file name."""
    protos = answer.file_descriptor_response.file_descriptor_proto
    files = [descriptor_pb2.FileDescriptorProto.FromString(proto) for proto in protos]
    return {file.name: file for file in files}


@pytest.mark.interop
@both_versions
def test_buf_lists_services(buf, version):
    assert curl(buf, version, "", "--list-services").split() == LISTED


@pytest.mark.interop
@both_versions
def test_buf_lists_methods(buf, version):
    methods = curl(buf, version, "", "--list-methods").split()
    assert f"{HEALTH}/Check" in methods
    assert f"{CONTROL}/WatchStats" in methods
    assert {method.rpartition("/")[0] for method in methods} == set(LISTED)


@pytest.mark.interop
@both_versions
def test_buf_calls_a_method_whose_schema_it_only_has_from_reflection(buf, version):
    answer = curl(buf, version, f"/{HEALTH}/Check", "--data", "{}")
    assert json.loads(answer) == {"status": "SERVING"}


@both_versions
def test_list_services(version):
    answer = ask(version, list_services="")
    assert [service.name for service in answer.list_services_response.service] == LISTED


@both_versions
@pytest.mark.parametrize(
    "question",
    [
        {"file_by_filename": "triolet/v1/control.proto"},
        {"file_containing_symbol": CONTROL},
        {"file_containing_symbol": f"{CONTROL}.Abort"},
        {"file_containing_symbol": "triolet.v1.AbortRequest"},
    ],
    ids=lambda question: next(iter(question.values())),
)
def test_a_file_comes_with_all_that_it_imports(version, question):
    assert files_in(ask(version, **question)).keys() == {
        "triolet/v1/control.proto",
        "triolet/v1/common.proto",
        "google/protobuf/duration.proto",
        "google/protobuf/timestamp.proto",
    }


@both_versions
@pytest.mark.parametrize("about", VERSIONS)
def test_each_reflection_service_describes_itself_and_the_other(version, about):
    package = f"grpc.reflection.{about}"
    [file] = files_in(ask(version, file_containing_symbol=f"{package}.ServerReflection")).values()
    assert file.package == package


@both_versions
@pytest.mark.parametrize("question", ["file_by_filename", "file_containing_symbol"])
def test_an_unknown_name_is_not_found(version, question):
    error = ask(version, **{question: "no.such.thing"}).error_response
    assert error.error_code == grpc.StatusCode.NOT_FOUND.value[0]


@both_versions
def test_an_empty_question_is_an_invalid_argument(version):
    error = ask(version).error_response
    assert error.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
