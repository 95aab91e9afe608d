"""JSON documents: data classes read back as they were written, and errors name the field."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest

from depthfold.core import ConvShape, Document, FlaggedSpan, Layer, Network, Plan, Refusal, Skip, Span
from depthfold.errors import InvalidValue
from depthfold.support.document import decode_fields, encode
from structures import chain, mobilenet_v2, resnet34, shape, vgg19

VALUES = [
    Span(0, 3),
    FlaggedSpan(0, 3, True, False),
    shape(4, 8, kernel=5, stride=2, groups=4),
    ConvShape(in_channels=1, out_channels=1, kernel=(3,), stride=(1,), padding=((0, 2),), dilation=(1,), groups=1),
    Skip(source=0, target=2, where="add"),
    Skip(source=0, target=2, where="add", projection=shape(4, 8, kernel=1)),
    Layer(where="conv", shape=shape(4, 4), in_size=(8, 8), out_size=(8, 8), norm="bn", activation="relu6"),
    Refusal("pool", "pooling", "it pools", 3),
    Refusal("pool", "pooling", "it pools"),
    Plan((1, 3), (1, 2, 3)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_data_class_reads_back_unchanged(value):
    data = json.loads(json.dumps(encode(value)))
    assert decode_fields(type(value), data, "here") == value


@pytest.mark.parametrize("network", [mobilenet_v2(1.4), vgg19(), resnet34(), Network(name="none", layers=())])
def test_network_reads_back_unchanged(network):
    again = Network.loads(network.dumps())
    assert again == network
    assert again.flagged_spans("full") == network.flagged_spans("full")


def test_plan_reads_back_unchanged():
    plan = Plan((3, 9), (2, 3))
    assert Plan.loads(plan.dumps()) == plan
    assert plan.to_json() == {"format": "depthfold.plan", "version": 1, "activations": [3, 9], "cuts": [2, 3]}


def plan_with(**change):
    return {"format": "depthfold.plan", "version": 1, "activations": [1], "cuts": [1]} | change


def test_other_format_is_refused():
    with pytest.raises(
        InvalidValue, match=r"has format 'depthfold.network', version 1; Plan reads format 'depthfold.plan'"
    ):
        Plan.loads(chain(3).dumps())


@pytest.mark.parametrize("version", [2, 0, None, "1"])
def test_other_version_is_refused(version):
    with pytest.raises(
        InvalidValue, match=f"version {version!r}; Plan reads .*, version 1.* the version of depthfold that wrote it"
    ):
        Plan.from_json(plan_with(version=version))


def test_document_without_a_format_is_refused():
    with pytest.raises(InvalidValue, match="has format None, version None"):
        Plan.from_json({"activations": [], "cuts": []})


def test_text_that_is_not_a_json_object_is_refused():
    with pytest.raises(InvalidValue, match=r"This is not JSON: .* Expected a 'depthfold.plan' document"):
        Plan.loads("{")
    with pytest.raises(InvalidValue, match=r"Expected a JSON object with a 'depthfold.plan' document, found list"):
        Plan.loads("[1]")


def test_unknown_field_is_refused():
    with pytest.raises(InvalidValue, match="Plan: unknown field 'cut'; the fields are activations, cuts"):
        Plan.from_json(plan_with(cut=[]))


def test_missing_field_is_refused():
    data = plan_with()
    del data["cuts"]
    with pytest.raises(InvalidValue, match="Plan: the field 'cuts' is missing"):
        Plan.from_json(data)


def test_fields_with_defaults_may_be_missing():
    data = chain(3, 3).to_json()
    for name in ("skips", "barriers", "refusals"):
        del data[name]
    assert Network.from_json(data) == chain(3, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(cuts=3), r"Plan\.cuts: expected a list, found int"),
        (dict(cuts="12"), r"Plan\.cuts: expected a list, found str"),
        (dict(cuts=[1, "2"]), r"Plan\.cuts\[1\]: expected int, found '2'"),
        (dict(cuts=[1.5]), r"Plan\.cuts\[0\]: expected int, found 1.5"),
        (dict(cuts=[True]), r"Plan\.cuts\[0\]: expected int, found True"),
        (dict(activations=[None]), r"Plan\.activations\[0\]: expected int, found None"),
    ],
)
def test_wrong_type_is_refused_with_its_path(change, message):
    with pytest.raises(InvalidValue, match=message):
        Plan.from_json(plan_with(**change))


def network_with(path, value):
    data = json.loads(mobilenet_v2().dumps())
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("name",), 3, r"Network\.name: expected str, found 3"),
        (("layers", 4, "shape"), [], r"Network\.layers\[4\]\.shape: expected an object, found list"),
        (
            ("layers", 4, "shape", "kernel"),
            None,
            r"Network\.layers\[4\]\.shape\.kernel: expected a list, found NoneType",
        ),
        (("layers", 4, "shape", "padding", 1), [1], r"shape\.padding\[1\]: expected 2 items, found 1"),
        (("layers", 4, "shape", "colour"), 1, r"Network\.layers\[4\]\.shape: unknown field 'colour'"),
        (("layers", 4, "activation"), 6, r"Network\.layers\[4\]\.activation: expected str, found 6"),
        (("skips", 0, "source"), None, r"Network\.skips\[0\]\.source: expected int, found None"),
        (("barriers",), [99], "Barriers must be ascending positions"),
        (("layers", 4, "shape", "groups"), 7, "7 groups do not divide"),
    ],
)
def test_errors_in_nested_fields_have_their_path(path, value, message):
    with pytest.raises(InvalidValue, match=message):
        Network.from_json(network_with(path, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything(Document):
    FORMAT: ClassVar[str] = "test.everything"

    share: float
    kind: Literal["a", "b"]
    table: Mapping[str, int]
    keys: frozenset[int] = frozenset()


def test_floats_literals_and_mappings_are_checked():
    value = Everything(share=0.5, kind="a", table={"x": 1}, keys=frozenset({2, 1}))
    assert Everything.loads(value.dumps()) == value
    good = value.to_json()
    assert type(Everything.from_json(good | {"share": 2}).share) is float
    for change, message in (
        ({"share": True}, "Everything.share: expected float, found True"),
        ({"kind": "c"}, "Everything.kind: expected one of 'a', 'b', found 'c'"),
        ({"table": []}, "Everything.table: expected an object, found list"),
        ({"table": {"x": "1"}}, "Everything.table.x: expected int, found '1'"),
    ):
        with pytest.raises(InvalidValue, match=message):
            Everything.from_json(good | change)


def test_nan_is_not_written():
    with pytest.raises(ValueError, match="not JSON compliant"):
        Everything(share=float("nan"), kind="a", table={}).dumps()


def test_value_without_a_json_form_is_refused():
    with pytest.raises(InvalidValue, match="complex has no JSON form"):
        encode((1, 2j))
