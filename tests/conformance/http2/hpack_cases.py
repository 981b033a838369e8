"""h2spec's cases of RFC 7541: blocks of headers that cannot be decoded."""

from hpack.hpack import encode_integer

from tests.conformance.http2.cases import (
    HEADER_TABLE_SIZE,
    HELLO,
    case,
    connection_error,
    headers,
)

NEW_NAME = bytes.fromhex("00 85f2b24a84ff")  # the name x-test; its value follows
BEYOND = 70  # an unused index: the static table has 61 entries, a request adds fewer than eight
FAULTS = {
    "hpack/2.3.3/1": ("A header from beyond the tables", bytes([0x80 | BEYOND])),
    "hpack/2.3.3/2": ("A name from beyond the tables", b"\x7f" + bytes([BEYOND - 63, 0])),
    "hpack/4.2/1": ("A new size of the table after headers", b"\x21"),
    "hpack/5.2/1": ("Padding of a whole byte", NEW_NAME + bytes.fromhex("84 49509fff")),
    "hpack/5.2/2": ("Padding of zeros", NEW_NAME + bytes.fromhex("83 495090")),
    "hpack/5.2/3": ("The symbol of the end", NEW_NAME + bytes.fromhex("87 4951fffffffa7f")),
    "hpack/6.1/1": ("A header of the number 0", b"\x80"),
}


def with_fault(fault):
    """Return a case whose request ends its block of headers with these bytes."""

    def run(client):
        client.send(headers(1, client.encode(client.fields(HELLO)) + fault))
        connection_error(client, "COMPRESSION_ERROR")

    return run


for number, (title, fault) in FAULTS.items():
    case(number, title)(with_fault(fault))


@case("hpack/6.3/1", "A table of headers that is larger than the server allows")
def _(client):
    size = encode_integer(client.settings.get(HEADER_TABLE_SIZE, 4096) + 1, 5)
    size[0] |= 0x20
    client.send(headers(1, bytes(size) + client.encode(client.fields(HELLO))))
    connection_error(client, "COMPRESSION_ERROR")
