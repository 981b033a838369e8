"""Every element of our protos has a comment, and reflection v1 is v1alpha renamed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2 as v1alpha_pb2

from grpc_service._generated.grpc_reflection_v1 import reflection_pb2 as v1_pb2

PROTO = Path(__file__).resolve().parents[2] / "proto"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the descriptors of the protos of triolet.v1, with the comments of each element."""
    out = tmp_path_factory.mktemp("descriptors") / "set.binpb"
    names = sorted(path.relative_to(PROTO).as_posix() for path in PROTO.glob("triolet/v1/*.proto"))
    options = (f"-I{PROTO}", "--include_source_info", f"--descriptor_set_out={out}")
    command = [sys.executable, "-m", "grpc_tools.protoc", *options, *names]
    subprocess.run(command, cwd=PROTO, check=True, timeout=60)
    files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    assert sorted(file.name for file in files) == names
    return files


def elements(file):
    """Yield every element of a file that needs a comment, as (name, path in the descriptor).

    A path is that of SourceCodeInfo: field numbers of descriptor.proto and indices, in turn.
    """
    fields = descriptor_pb2.FileDescriptorProto
    for i, message in enumerate(file.message_type):
        path = (fields.MESSAGE_TYPE_FIELD_NUMBER, i)
        yield from message_elements(message, message.name, path)
    for i, enum in enumerate(file.enum_type):
        yield from enum_elements(enum, enum.name, (fields.ENUM_TYPE_FIELD_NUMBER, i))
    for i, service in enumerate(file.service):
        path = (fields.SERVICE_FIELD_NUMBER, i)
        yield service.name, path
        for j, method in enumerate(service.method):
            number = descriptor_pb2.ServiceDescriptorProto.METHOD_FIELD_NUMBER
            yield f"{service.name}.{method.name}", (*path, number, j)


def message_elements(message, name, path):
    """Yield a message, its fields, written oneofs and nested types, without map entries."""
    if message.options.map_entry:
        return
    numbers = descriptor_pb2.DescriptorProto
    synthetic = {field.oneof_index for field in message.field if field.proto3_optional}
    yield name, path
    for i, field in enumerate(message.field):
        yield f"{name}.{field.name}", (*path, numbers.FIELD_FIELD_NUMBER, i)
    for i, oneof in enumerate(message.oneof_decl):
        if i not in synthetic:
            yield f"{name}.{oneof.name}", (*path, numbers.ONEOF_DECL_FIELD_NUMBER, i)
    for i, nested in enumerate(message.nested_type):
        inner = (*path, numbers.NESTED_TYPE_FIELD_NUMBER, i)
        yield from message_elements(nested, f"{name}.{nested.name}", inner)
    for i, enum in enumerate(message.enum_type):
        inner = (*path, numbers.ENUM_TYPE_FIELD_NUMBER, i)
        yield from enum_elements(enum, f"{name}.{enum.name}", inner)


def enum_elements(enum, name, path):
    """Yield an enum and its values."""
    yield name, path
    for i, value in enumerate(enum.value):
        number = descriptor_pb2.EnumDescriptorProto.VALUE_FIELD_NUMBER
        yield f"{name}.{value.name}", (*path, number, i)


def uncommented(file):
    """Return the names of a file's elements without a comment directly above them."""
    commented = {
        tuple(location.path)
        for location in file.source_code_info.location
        if location.leading_comments.strip()
    }
    return [name for name, path in elements(file) if path not in commented]


def test_everything_in_our_protos_has_a_comment(files):
    assert {file.name: uncommented(file) for file in files} == {file.name: [] for file in files}


def test_the_search_for_comments_reaches_every_kind_of_element(files):
    for file in files:
        file = descriptor_pb2.FileDescriptorProto.FromString(file.SerializeToString())
        every = [name for name, _ in elements(file)]
        del file.source_code_info.location[:]
        assert uncommented(file) == every
    names = {name for file in files for name, _ in elements(file)}
    assert {
        "Inference",
        "Inference.Generate",
        "GenerateRequest",
        "GenerateRequest.input",
        "GenerateRequest.n",
        "SamplingParams.logit_bias",
        "FinishReason",
        "FinishReason.FINISH_REASON_STOP",
    } <= names
    assert not {name for name in names if "Entry" in name or "._" in name}


def test_comments_are_sentences(files):
    for file in files:
        for location in file.source_code_info.location:
            comment = location.leading_comments.strip()
            assert not comment or comment[-1] in ".:" or "buf:lint:ignore" in comment, comment


def test_reflection_v1_is_v1alpha_under_another_package():
    """grpc_service.services.reflection answers v1 with v1alpha messages.

    Their descriptors must therefore agree.
    """
    v1, v1alpha = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()
    v1_pb2.DESCRIPTOR.CopyToProto(v1)
    v1alpha_pb2.DESCRIPTOR.CopyToProto(v1alpha)
    for file in (v1, v1alpha):
        file.ClearField("name")
        file.ClearField("options")  # these only say where other languages put their generated code
    assert str(v1) == str(v1alpha).replace("grpc.reflection.v1alpha", "grpc.reflection.v1")
