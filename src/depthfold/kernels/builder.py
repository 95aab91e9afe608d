"""Build the graph of a fused module: the nodes of a model, with the kernels at the sites that were found."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from depthfold.kernels.convolution import Depthwise, convolve, pointwise
from depthfold.kernels.norm import Norm, fold, norm_act
from depthfold.kernels.pooling import norm_act_pool
from depthfold.kernels.sites import ConvSite, NormSite, Sites
from depthfold.kernels.weights import cast, count, prepare


class Builder:
    """Builds the graph for a model in training. It reads the model's own parameters and buffers."""

    dtype: torch.dtype | None = None  # of the computation; None: that of autocast or of the input

    def __init__(self, source: fx.GraphModule, sites: Sites) -> None:
        self._source, self._sites = source, sites
        self._graph = fx.Graph()
        self._attributes: dict[str, Any] = {}
        self._values: dict[fx.Node, fx.Node] = {}  # of the model's nodes
        self._sums: dict[fx.Node, fx.Node] = {}  # of convolutions, for the batch norm after them
        self._weights: dict[tuple[fx.Node, str], fx.Node] = {}

    def build(self) -> fx.GraphModule:
        nodes = list(self._source.graph.nodes)
        inputs = {node: self._graph.node_copy(node) for node in nodes if node.op == "placeholder"}
        self._values = {node: self._call(prepare, value, self.dtype) for node, value in inputs.items()}
        self._declare(next(iter(self._values.values()), None))
        for node in nodes:
            if node.op != "placeholder" and node not in self._sites.inside:
                self._values[node] = self._emit(node)
        self._graph.lint()
        return fx.GraphModule(self._attributes, self._graph, class_name="Fused")

    def _emit(self, node: fx.Node) -> fx.Node:
        """Add the node, or what replaces it, and return its value."""
        if node in self._sites.convs:
            return self._convolution(node, self._sites.convs[node])
        if node in self._sites.norms:
            return self._norm(self._sites.norms[node])
        if node in self._sites.linears:
            return self._call(F.linear, self._values[node.all_input_nodes[0]], *self._layer_weights(node))
        if node.op in ("call_module", "get_attr"):
            self._attributes[str(node.target)] = operator.attrgetter(str(node.target))(self._source)
        return self._graph.node_copy(node, self._values.__getitem__)

    def _convolution(self, node: fx.Node, site: ConvSite) -> fx.Node:
        conv: Any = site.module
        weight, bias = self._layer_weights(node)
        if not site.has_kernel and site.kind == "pointwise":
            return self._call(pointwise, self._values[site.source], weight, bias, conv.padding)
        if not site.has_kernel:
            padding = conv.padding if site.pad is None else site.padding[0]
            settings = (conv.stride, padding, conv.dilation, conv.groups)
            return self._call(F.conv2d, self._values[site.source], weight, bias, *settings)
        depthwise = Depthwise(conv.stride[0], *site.padding) if site.kind == "depthwise" else None
        pivot = None if site.following is None else self._pivot(site.following)
        norm = site.norm
        before = (self._values[site.source], None, None, None) if norm is None else self._norm_arguments(norm)
        outputs = self._call(convolve, *before, weight, depthwise, pivot)
        if pivot is not None:
            self._sums[node] = self._call(operator.getitem, outputs, 1)
        return self._call(operator.getitem, outputs, 0)

    def _norm(self, site: NormSite) -> fx.Node:
        if site.pool:
            return self._call(norm_act_pool, *self._norm_arguments(site))
        residual = None if site.residual is None else self._values[site.residual]
        return self._call(norm_act, *self._norm_arguments(site), residual)

    def _norm_arguments(self, site: NormSite) -> tuple[Any, ...]:
        """Return the map, its sums if the convolution before it computes them, the batch norm, and the cap."""
        return self._values[site.source], self._sums.get(site.source), self._norm_tensors(site), site.cap

    def _declare(self, x: fx.Node | None) -> None:
        """Add the nodes of the weights, and count the batch."""
        weights = self._sites.weights()
        tensors = [self._attribute(node, name, weight) for (node, name), weight in weights.items()]
        copies = self._call(cast, x, *tensors)
        self._weights = {key: self._call(operator.getitem, copies, i) for i, key in enumerate(weights)}
        sites = self._sites.norms.values()
        batches = [self._attribute(site.chain[0], "batches", site.module.num_batches_tracked) for site in sites]
        if batches:
            self._call(count, *batches)

    def _norm_tensors(self, site: NormSite) -> Any:
        """Return the nodes of a batch norm's tensors."""
        values = norm_of(site, self._sites)._asdict()
        nodes = {name: self._attribute(site.chain[0], name, v) for name, v in values.items() if isinstance(v, Tensor)}
        return Norm(**values | nodes)

    def _pivot(self, following: NormSite) -> fx.Node | None:
        return self._attribute(following.chain[0], "running_mean", following.module.running_mean)

    def _attribute(self, node: fx.Node, name: str, tensor: Tensor | None) -> fx.Node:
        target = f"depthfold_{node.name}_{name}"
        self._attributes[target] = tensor
        return self._graph.get_attr(target)

    def _layer_weights(self, node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
        return self._weights[node, "weight"], self._weights.get((node, "bias"))

    def _call(self, function: Any, *arguments: Any) -> fx.Node:
        return self._graph.call_function(function, arguments)


class EvalBuilder(Builder):
    """Builds the graph for a model in evaluation mode. It reads copies: `weights`, and the statistics of `norms`."""

    def __init__(self, source: fx.GraphModule, sites: Sites, dtype: torch.dtype) -> None:
        super().__init__(source, sites)
        self.dtype = dtype
        self.weights: list[tuple[Tensor, Tensor]] = []  # pairs of a copy and the model's tensor
        self.norms: list[tuple[Tensor, Norm]] = []

    def _declare(self, x: fx.Node | None) -> None:
        for (node, name), weight in self._sites.weights().items():
            self.weights.append((torch.empty_like(weight, dtype=self.dtype, requires_grad=False), weight))
            self._weights[node, name] = self._attribute(node, name, self.weights[-1][0])

    def _norm_tensors(self, site: NormSite) -> fx.Node:
        norm = norm_of(site, self._sites)
        self.norms.append((fold(norm), norm))
        return self._attribute(site.chain[0], "statistics", self.norms[-1][0])

    def _pivot(self, following: NormSite) -> None:
        return None


def norm_of(site: NormSite, sites: Sites) -> Norm:
    """Return the tensors and numbers of a batch norm."""
    norm: Any = site.module
    conv = sites.convs.get(site.source)
    offset = conv.module.bias if conv is not None and conv.following is site else None
    return Norm(norm.weight, norm.bias, offset, norm.running_mean, norm.running_var, float(norm.momentum), norm.eps)
