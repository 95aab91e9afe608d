"""All kernels compile for a GPU. Triton's interpreter accepts code that its compiler does not."""

import subprocess
import sys

import pytest

from lacking import needs

# The launchers run as they are, but a kernel is compiled to Triton's first intermediate language instead of launched.
COMPILE = """
import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction

from depthfold.kernels import convolution, norm, pooling
from depthfold.kernels.device import depthwise, partials, pointwise

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", float: "fp32", int: "i32"}
TARGET = GPUTarget("cuda", 90, 32)
compiled = set()


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, num_warps=4, num_stages=3, **constants):
            names, backend = self.kernel.arg_names, make_backend(TARGET)
            given = dict(zip(names, args)) | constants
            types = {name: TYPES[getattr(v, "dtype", type(v))] for name, v in given.items() if name not in constants}
            source = ASTSource(
                fn=self.kernel,
                signature={name: types.get(name, "constexpr") for name in names},
                constexprs={(names.index(name),): value for name, value in constants.items()},
            )
            options = backend.parse_options(dict(num_warps=num_warps, num_stages=num_stages))
            context = ir.context()
            ir.load_dialects(context)
            backend.load_dialects(context)
            implementation = backend.get_codegen_implementation(options)
            source.make_ir(TARGET, options, implementation, backend.get_module_map(), context).verify()
            compiled.add(self.kernel.__name__)

        return launch


for module in (convolution, norm, pooling):
    for name, value in list(vars(module).items()):
        if isinstance(value, JITFunction):
            setattr(module, name, Compiled(value))


def bfloat16(*shape):
    tensor = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    return tensor.contiguous(memory_format=torch.channels_last)


def batch_norm(channels):
    return norm.Norm(*(torch.zeros(channels, requires_grad=i < 3) for i in range(5)), 0.1, 1e-5)


x = bfloat16(2, 16, 4, 4)
for cap in (None, 6.0):
    for stride, size in ((1, 3), (2, 3), (1, 5), (2, 5)):
        weight, geometry = bfloat16(16, 1, size, size), convolution.Depthwise(stride, (1, 1), (1, 1))
        convolution.convolve(x, None, batch_norm(16), cap, weight, geometry, torch.zeros(16))[0].sum().backward()
    convolution.convolve(x, None, batch_norm(16), cap, bfloat16(8, 16, 1, 1), None, torch.zeros(8))[0].sum().backward()
    norm.norm_act(x, None, batch_norm(16), cap, x).sum().backward()
    pooling.norm_act_pool(x, None, batch_norm(16), cap).sum().backward()
convolution.convolve(x, None, None, None, weight, geometry, None)[0].sum().backward()
print(*sorted(compiled))
"""


@pytest.mark.slow
@needs("triton")
def test_all_kernels_compile():
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [
        "add_partials", "batch_statistics", "depthwise_backward", "depthwise_forward", "gradient_coefficients",
        "gradient_sums", "map_gradient", "map_sums", "normalise", "pointwise_backward", "pointwise_forward", "pool",
        "pool_gradient_sums", "pool_map_gradient",
    ]  # fmt: skip
