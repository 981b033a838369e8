"""Images that were read are kept by the digests of their files."""

import pytest

from engine.images.errors import BadImage
from engine.images.preprocessor import digest_of
from engine.requests.text.kept_images import KeptImages
from engine.worker.fakes.preprocessor import FakePreprocessor
from tests.simulator.encode_oracle import image_file

FILES = [image_file(bytes([number, 1, 2] * 16)) for number in range(5)]


class Counted:
    """An image preprocessor that counts how often it decodes."""

    def __init__(self, **fields):
        self.num_decoded = 0
        self.preprocessor = FakePreprocessor(1.0, self._note, **fields)

    def _note(self, seconds):
        self.num_decoded += 1


def test_an_image_is_decoded_once_for_each_way_to_read_it():
    kept, first, second = KeptImages(), Counted(), Counted(is_whole=True)
    for _ in range(3):
        for one in (first, second):
            found = kept.read(one.preprocessor, FILES[0])
            assert found.digest == digest_of(FILES[0])
            assert found.seen == one.preprocessor.read(FILES[0])
            one.num_decoded -= 1
    assert (first.num_decoded, second.num_decoded) == (1, 1)
    kept.read(first.preprocessor, FILES[1])
    assert first.num_decoded == 2


def test_an_image_is_kept_for_its_owner_alone():
    kept, one = KeptImages(), Counted()
    owners = ("", "ann", "ben", "ann", "")
    digests = {kept.read(one.preprocessor, FILES[0], owner=owner).digest for owner in owners}
    assert len(digests) == one.num_decoded == 3


def test_what_is_kept_is_bounded_and_the_oldest_goes_first():
    one = Counted()
    kept = KeptImages(2 * one.preprocessor.max_bytes)
    for number in (0, 1, 0, 2, 0, 2):
        kept.read(one.preprocessor, FILES[number])
    assert one.num_decoded == 3
    kept.read(one.preprocessor, FILES[1])
    assert one.num_decoded == 4
    assert kept.num_bytes == 2 * one.preprocessor.max_bytes
    KeptImages(1).read(one.preprocessor, FILES[0])


def test_a_file_that_is_no_image_is_refused_each_time():
    kept, one = KeptImages(), Counted()
    for _ in range(2):
        with pytest.raises(BadImage):
            kept.read(one.preprocessor, b"x")
    assert kept.num_bytes == 0
