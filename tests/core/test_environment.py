from __future__ import annotations

import numpy as np
import pytest

from depthfold.core import Environment
from depthfold.errors import InvalidValue

GPU = Environment(machine="lab", device="RTX 2080 Ti", runtime="TensorRT", batch=128, input_size=(3, 224, 224))


def test_differences_describe_each_field() -> None:
    other = Environment(machine="lab", device="CPU", runtime="TensorRT", batch=1, threads=4)
    assert GPU.differences(other) == ("device: RTX 2080 Ti against CPU", "batch: 128 against 1")


def test_missing_fields_do_not_differ() -> None:
    assert GPU.differences(Environment()) == ()
    assert Environment().differences(GPU) == ()
    assert GPU.differences(GPU) == ()


def test_environment_prints_and_reads_back_from_json() -> None:
    assert str(GPU) == "machine lab, device RTX 2080 Ti, runtime TensorRT, batch 128, input size 3x224x224"
    assert str(Environment()) == "not stated"
    assert Environment.loads(GPU.dumps()) == GPU


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"machine": ""}, "The machine of an environment is empty"),
        ({"batch": 0}, "The batch of an environment must be an integer of at least 1, found 0"),
        ({"threads": 1.5}, "The threads of an environment must be an integer"),
        (
            {"input_size": (3, 0)},
            "Each number in the input size of an environment must be an integer",
        ),
        ({"input_size": ()}, "The input size of an environment is empty"),
        ({"input_size": 224}, "The input size of an environment must be a sequence, found 224"),
        ({"input_size": "3x224"}, "The input size of an environment must be a sequence"),
        ({"input_size": (3, 1.5)}, r"integer of at least 1, found 1\.5"),
        ({"batch": True}, "The batch of an environment must be an integer of at least 1, found True"),
    ],
)
def test_invalid_fields_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        Environment(**fields)


def test_lists_and_numpy_numbers_are_converted() -> None:
    converted = Environment(batch=np.int64(128), input_size=[3, np.int32(224), 224])
    assert converted == Environment(batch=128, input_size=(3, 224, 224))
    assert hash(converted) == hash(Environment.loads(converted.dumps()))
    assert type(converted.batch) is int
