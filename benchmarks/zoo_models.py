"""Build the networks of the zoo and their inputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from zoo_others import OTHERS
from zoo_packages import PACKAGES

from depthfold.vision import import_timm, import_torchvision

SEGMENTATION = (
    "segmentation/deeplabv3_mobilenet_v3_large",
    "segmentation/deeplabv3_resnet50",
    "segmentation/deeplabv3_resnet101",
    "segmentation/fcn_resnet50",
    "segmentation/fcn_resnet101",
    "segmentation/lraspp_mobilenet_v3_large",
)
# Detection models are traced at their backbones: their heads cannot be traced.
DETECTION = (
    "detection/fasterrcnn_resnet50_fpn",
    "detection/fasterrcnn_resnet50_fpn_v2",
    "detection/fasterrcnn_mobilenet_v3_large_fpn",
    "detection/fasterrcnn_mobilenet_v3_large_320_fpn",
    "detection/fcos_resnet50_fpn",
    "detection/keypointrcnn_resnet50_fpn",
    "detection/maskrcnn_resnet50_fpn",
    "detection/maskrcnn_resnet50_fpn_v2",
    "detection/retinanet_resnet50_fpn",
    "detection/retinanet_resnet50_fpn_v2",
    "detection/ssd300_vgg16",
    "detection/ssdlite320_mobilenet_v3_large",
)
VIDEO = ("video/r3d_18", "video/mc3_18", "video/r2plus1d_18", "video/s3d")
TIMM_NAMES = """
resnet18 resnet50 resnet50d resnetrs50 resnext50_32x4d seresnet50 seresnext26d_32x4d ecaresnet50t wide_resnet50_2
resnetaa50 resnetblur50 resnetv2_50 resnetv2_50x1_bit legacy_seresnet18 skresnet18 resnest14d res2net50_26w_4s
res2next50 gernet_s gcresnet33ts mobileone_s0 repvgg_a0 repvgg_b1g4 regnetz_b16 edgenext_xx_small regnetx_002
regnety_002 regnetz_005 nf_regnet_b0 nf_resnet26 dm_nfnet_f0 eca_nfnet_l0 mobilenetv1_100 mobilenetv2_100
mobilenetv2_140 mobilenetv3_large_100 mobilenetv3_small_100 mobilenetv4_conv_small mobilenetv4_conv_medium
mobilenetv4_hybrid_medium tf_mobilenetv3_large_075 tf_mobilenetv3_large_100 tf_mobilenetv3_large_minimal_100
tf_mobilenetv3_small_075 tf_mobilenetv3_small_100 tf_mobilenetv3_small_minimal_100 mobilenet_edgetpu_v2_s mnasnet_100
mnasnet_small semnasnet_100
spnasnet_100 fbnetc_100 fbnetv3_b lcnet_100 hardcorenas_a tinynet_a mixnet_s efficientnet_b0 efficientnet_lite0
efficientnet_es efficientnetv2_rw_t tf_efficientnet_b0 tf_efficientnet_lite0 tf_efficientnet_lite1 tf_efficientnet_lite2
tf_efficientnet_lite3 tf_efficientnet_lite4 gc_efficientnetv2_rw_t efficientnet_b0_gn
rexnet_100 rexnetr_100 convnext_atto convnextv2_atto convmixer_768_32 inception_next_atto fasternet_t0 starnet_s1
focalnet_tiny_srf rdnet_tiny densenet121 densenetblur121d inception_v3 inception_v4 inception_resnet_v2
inception_next_tiny vgg11 vgg16_bn ghostnet_100 ghostnetv2_100 repghostnet_100 repvit_m0_9 fastvit_t8 lcnetv2_base
darknet21 darknet53 cspdarknet53 cspresnet50 cs3darknet_s cs3darknet_focus_s sedarknet21 hrnet_w18_small dla34 dla46_c
dla60_res2net dpn68 selecsls42 tresnet_m vovnet39a ese_vovnet19b_dw hgnet_tiny hgnetv2_b0 xception41 xception41p
legacy_xception nasnetalarge pnasnet5large mobilevit_xxs poolformer_s12 shvit_s1 swiftformer_xs visformer_tiny
mambaout_femto
"""
TIMM = tuple(f"timm/{name}" for name in TIMM_NAMES.split())
# Input sizes to try, an odd one first, because errors in merging show up at the borders.
SIZES = (65, 97, 128, 224)
# How much height and width grow for the other size: first to another parity and aspect ratio, then in steps that
# networks with upsampling accept, then to a square.
STEPS = ((10, 23), (32, 64), (32, 32))
OWN_SIZE = OTHERS | PACKAGES
REFUSALS = (RuntimeError, AssertionError, ValueError, TypeError)


def classification() -> list[str]:
    """Return the names of all classification models of torchvision that are CNNs."""
    torchvision = import_torchvision()
    transformers = ("vit_", "swin_", "maxvit_")
    names = torchvision.models.list_models(module=torchvision.models)
    return [name for name in names if not name.startswith(transformers)]


def build(name: str) -> tuple[nn.Module, str | None]:
    """Return the model and the submodule to trace. Weights are random except for those of zoo_packages.TRAINED."""
    if name in OWN_SIZE:
        return OWN_SIZE[name][0](), None
    family, _, plain = name.rpartition("/")
    if family == "timm":
        return import_timm().create_model(plain, pretrained=False), None
    models = import_torchvision().models
    builder = models.get_model_builder(plain)
    options: dict[str, Any] = {"weights": None}
    parameters = inspect.signature(builder).parameters
    if "weights_backbone" in parameters:
        options["weights_backbone"] = None
    if plain in ("googlenet", "inception_v3"):
        options["init_weights"] = False  # its own initialisation takes minutes
    at = None
    if family == "detection":
        at = "backbone" if plain.startswith("ssd") else "backbone.body"
        if not plain.startswith("ssd"):
            options |= {"min_size": 127, "max_size": 155}  # the defaults would enlarge every image to 800 pixels
    return builder(**options), at


def inputs_for(name: str, model: nn.Module, dtype: torch.dtype) -> Any:
    """Return random inputs of the first size that the network accepts."""
    if name.startswith("video/"):
        side = 224 if name.endswith("s3d") else 65  # its last pool has size 7
        return torch.randn(1, 3, 16, side, side, dtype=dtype)
    if name.startswith("detection/"):
        return [torch.randn(3, 127, 155, dtype=dtype)]
    if name in OWN_SIZE:
        return torch.randn(1, *OWN_SIZE[name][1], dtype=dtype)
    model.eval()
    problem: Exception | None = None
    for size in SIZES:
        x = torch.randn(1, 3, size, size, dtype=dtype)
        try:
            with torch.no_grad():
                model(x)
        except REFUSALS as error:
            problem = error
            continue
        return x
    raise RuntimeError(f"no size of {SIZES} fits: {problem}")


def of_other_sizes(inputs: Any) -> Iterator[Any]:
    """Yield random inputs of other sizes, in order of preference."""

    def grown(tensor: Tensor, steps: tuple[int, ...]) -> Tensor:
        leading = 1 if tensor.dim() == 3 and isinstance(inputs, list) else 2  # images in a list have no batch dimension
        sides = [side + steps[n % len(steps)] for n, side in enumerate(tensor.shape[leading:])]
        return torch.randn(*tensor.shape[:leading], *sides, dtype=tensor.dtype)

    for steps in STEPS:
        yield tree_map(lambda tensor, steps=steps: grown(tensor, steps), inputs)
