"""The digest is the same for equal contents and changes with each part."""

import hashlib

import pytest

from depthfold.support.digest import digest


def test_digest_has_16_hex_digits_and_does_not_depend_on_the_order_of_keys():
    assert digest({"a": 1, "b": [2.5, None]}, "text") == digest({"b": (2.5, None), "a": 1}, "text")
    assert len(digest()) == 16 and int(digest("x"), 16) >= 0


@pytest.mark.parametrize("other", [("b", "a"), ("ab",), ("a",), ("a", "b", ""), ("a", b"b"), (["a", "b"],)])
def test_digest_changes_with_each_part(other):
    assert digest("a", "b") != digest(*other)


def test_bytes_are_hashed_unchanged():
    data = b"0123456789"
    assert digest(data) == digest(memoryview(data)) == digest(data[:3], data[3:])
    assert digest(data) == hashlib.sha256(data).hexdigest()[:16]


def test_only_plain_data_has_a_digest():
    with pytest.raises(TypeError):
        digest(object())
