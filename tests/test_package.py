"""The package: its imports and its public names."""

import subprocess
import sys

import pytest

import depthfold as df


def python(code):
    """Run code in a new interpreter and return its output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_depthfold_does_not_import_torch():
    heavy = ("torch", "torchvision", "timm", "numpy", "onnx", "hypothesis")
    code = f"import sys, depthfold; print([name for name in {heavy!r} if name in sys.modules])"
    assert python(code) == "[]"


def test_data_classes_do_not_import_torch():
    code = "import sys, depthfold as df; df.Plan((), ()), df.Span(0, 1), df.Network; print('torch' in sys.modules)"
    assert python(code) == "False"


def test_every_public_name_resolves():
    assert {"trace", "rewrite", "merge", "verify", "Network", "Plan", "Span", "Verification"} <= set(df.__all__)
    for name in df.__all__:
        assert getattr(df, name) is not None
    assert set(df.__all__) <= set(dir(df))


def test_there_are_at_most_fifteen_public_functions_and_fifteen_classes():
    names = [name for name in df.__all__ if not name.startswith("_")]
    assert len([name for name in names if name[0].islower()]) <= 15
    assert len([name for name in names if name[0].isupper()]) <= 15


def test_unknown_name_is_an_attribute_error_that_lists_the_names():
    with pytest.raises(
        AttributeError, match=r"module 'depthfold' has no attribute 'shrink'; it has .*measure_latency, merge"
    ):
        _ = df.shrink
    assert not hasattr(df, "fold")


def test_star_import_works():
    assert python("from depthfold import *; print(trace.__name__, merge.__name__)") == "trace merge"


def test_errors_have_one_base_class():
    from depthfold import errors

    own = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    assert len(own) > 5
    assert all(issubclass(each, df.DepthfoldError) for each in own)


def test_vision_makes_torchvision_and_timm_importable():
    code = (
        "import depthfold.vision as vision; tv = vision.import_torchvision(); timm = vision.import_timm(); "
        "print(tv.__name__, timm.__name__, callable(tv.models.resnet18))"
    )
    assert python(code) == "torchvision timm True"


def test_missing_package_is_explained(monkeypatch):
    from depthfold import vision
    from depthfold.errors import MissingDependency

    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(
        MissingDependency, match=r"timm is not installed. In a clone of depthfold, run: pip install -e .\.\[timm\]."
    ):
        vision.import_timm()


def test_tracing_does_not_import_torchvision_or_timm():
    code = (
        "import sys, torch, depthfold as df; "
        "df.trace(torch.nn.Sequential(torch.nn.Conv2d(1, 1, 3)), torch.zeros(1, 1, 5, 5)); "
        "print([name for name in ('torchvision', 'timm') if name in sys.modules])"
    )
    assert python(code) == "[]"
