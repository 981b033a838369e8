"""Every element of our protos has a comment, and reflection v1 is v1alpha renamed."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2 as v1alpha_pb2

from grpc_service._generated.grpc_reflection_v1 import reflection_pb2 as v1_pb2

PROTO = Path(__file__).resolve().parents[2] / "proto"


# A line that begins an element: a message, enum, service, RPC, oneof, field, or value of an enum.
ELEMENT = re.compile(r"\s*(?:(?:message|enum|service|rpc|oneof) |[\w.<>, ]+ = \d+(?: \[.*)?;)")


def uncommented(text):
    """Return the lines that begin an element without a comment directly above them."""
    pairs = pairwise(text.splitlines())
    return [
        line for above, line in pairs if ELEMENT.match(line) and not above.strip().startswith("//")
    ]


@pytest.mark.parametrize(
    "path", sorted(PROTO.glob("triolet/v1/*.proto")), ids=lambda path: path.stem
)
def test_everything_in_our_protos_has_a_comment(path):
    assert uncommented(path.read_text()) == []


def test_an_element_without_a_comment_is_found():
    bare = [
        "message A {",
        *(
            "  oneof a {",
            "  map<int32, float> b = 1;",
            "  repeated b.C c = 2;",
            "  optional bool d = 3;",
        ),
        *("enum E {", "  E_UNSPECIFIED = 0;", "service S {", "  rpc A(B) returns (C);"),
    ]
    assert uncommented("\n".join(["", *bare])) == bare


def test_reflection_v1_is_v1alpha_under_another_package():
    """`grpc_service.services.reflection` answers calls of v1 with v1alpha's messages, so that both
    must have equal descriptors."""
    v1, v1alpha = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()
    v1_pb2.DESCRIPTOR.CopyToProto(v1)
    v1alpha_pb2.DESCRIPTOR.CopyToProto(v1alpha)
    for file in (v1, v1alpha):
        file.ClearField("name")
        file.ClearField("options")  # the options only say where other languages put generated code
    assert str(v1) == str(v1alpha).replace("grpc.reflection.v1alpha", "grpc.reflection.v1")
