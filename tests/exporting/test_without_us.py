"""Exported files run in a new interpreter that cannot import depthfold, with the same outputs."""

import os
import subprocess
import sys

import numpy
import pytest

import depthfold as df
from lacking import needs
from merged import classifier, merged, picture

REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("depthfold", "merged", "nets"):
            raise ImportError(f"{name} must not be needed")

sys.meta_path.insert(0, Refuse())
import numpy
file, samples, outputs = sys.argv[1:]
sample = numpy.load(samples)
"""

RUN = {
    "m.onnx": """
import onnxruntime
session = onnxruntime.InferenceSession(file)
found = session.run(None, {session.get_inputs()[0].name: sample})[0]
assert "torch" not in sys.modules
""",
    "m.pt2": """
import torch
found = torch.export.load(file).module()(torch.from_numpy(sample)).detach().numpy()
""",
    "m.xml": """
import openvino
found = openvino.compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(sample)[0]
""",
}


@pytest.mark.parametrize("name", ["m.onnx", "m.pt2", pytest.param("m.xml", marks=needs("openvino"))])
def test_file_runs_without_depthfold(tmp_path, name):
    shallow = merged(classifier())
    sample = picture(batch=5, seed=8)
    numpy.save(tmp_path / "sample.npy", sample.numpy())
    df.export(shallow, tmp_path / name)
    code = REFUSE + RUN[name] + "numpy.save(outputs, found)"
    files = [str(tmp_path / each) for each in (name, "sample.npy", "found.npy")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, *files], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    wanted = shallow(sample).detach().numpy()
    numpy.testing.assert_allclose(numpy.load(tmp_path / "found.npy"), wanted, rtol=1e-4, atol=1e-6)


def test_importing_depthfold_fails_in_that_interpreter(tmp_path):
    numpy.save(tmp_path / "sample.npy", numpy.zeros(1))
    files = ["none", str(tmp_path / "sample.npy"), "none"]
    done = subprocess.run(
        [sys.executable, "-I", "-c", REFUSE + "import depthfold", *files], capture_output=True, text=True
    )
    assert "depthfold must not be needed" in done.stderr
