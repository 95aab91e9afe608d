"""The networks of the paper as Network objects, without a model and without tracing."""

from depthfold.core import ConvShape, Layer, Network, Refusal, Skip

# expansion, channels, blocks, stride of the first block
MOBILENET_V2 = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def shape(ins, outs, kernel=3, stride=1, padding=None, dilation=1, groups=1):
    """Return the shape of a square 2-D convolution, by default with padding that keeps the size."""
    padding = (kernel - 1) * dilation // 2 if padding is None else padding
    return ConvShape(
        in_channels=ins,
        out_channels=outs,
        kernel=(kernel,) * 2,
        stride=(stride,) * 2,
        padding=((padding, padding),) * 2,
        dilation=(dilation,) * 2,
        groups=groups,
    )


class Builder:
    """Builds a network layer by layer."""

    def __init__(self, channels, size):
        self.channels, self.size, self.layers, self.skips = channels, (size, size), [], []
        self.widths, self.sizes = [channels], [self.size]  # at each position

    @property
    def position(self):
        return len(self.layers)

    def add(self, outs, activation="relu", **given):
        own = shape(self.channels, outs, **given)
        out_size = own.out_size(self.size)
        where = f"conv{self.position + 1}"
        self.layers.append(
            Layer(where=where, shape=own, in_size=self.size, out_size=out_size, norm=None, activation=activation)
        )
        self.channels, self.size = outs, out_size
        self.widths.append(outs)
        self.sizes.append(out_size)

    def skip(self, source, projection=None):
        where = f"add{self.position}"
        self.skips.append(Skip(source=source, target=self.position, where=where, projection=projection))

    def network(self, name, **given):
        return Network(name=name, layers=tuple(self.layers), skips=tuple(self.skips), **given)


def chain(*kernels, channels=4, size=16, **given):
    """Return a chain of convolutions with an activation after each."""
    build = Builder(channels, size)
    for kernel in kernels:
        build.add(channels, kernel=kernel)
    return build.network("chain", **given)


def mobilenet_v2(width=1.0, size=32):
    def scaled(channels):
        value = channels * width
        rounded = max(8, int(value + 4) // 8 * 8)
        return rounded + 8 if rounded < 0.9 * value else rounded

    build = Builder(scaled(32), size)
    for expansion, channels, blocks, first_stride in MOBILENET_V2:
        for n in range(blocks):
            source, ins, stride = build.position, build.channels, first_stride if n == 0 else 1
            hidden = ins * expansion
            if expansion > 1:
                build.add(hidden, "relu6", kernel=1)
            build.add(hidden, "relu6", kernel=3, stride=stride, groups=hidden)
            build.add(scaled(channels), None, kernel=1)
            if stride == 1 and ins == scaled(channels):
                build.skip(source)
    return build.network("MobileNetV2")


def vgg19():
    build = Builder(3, 32)
    barriers = []
    for channels, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(count):
            build.add(channels)
        barriers.append(build.position)
        build.size = tuple(n // 2 for n in build.size)
    refusals = [Refusal(f"pool{p}", "pooling", "pooling is not a convolution", p) for p in barriers[:-1]]
    return build.network("VGG19", barriers=tuple(barriers[:-1]), refusals=tuple(refusals))


def resnet34():
    build = Builder(64, 32)
    for channels, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for _ in range(blocks):
            source, ins = build.position, build.channels
            stride = 1 if ins == channels else 2
            build.add(channels, stride=stride)
            build.add(channels)
            build.skip(source, None if stride == 1 else shape(ins, channels, kernel=1, stride=2))
    return build.network("ResNet34")


def plain_chain(depth, activation="relu"):
    """Return a chain of equal 3x3 layers."""
    build = Builder(8, 16)
    for _ in range(depth):
        build.add(8, activation)
    return build.network("chain")
