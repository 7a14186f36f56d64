"""Models of other libraries, small and random, split over 8 simulated devices.

    python -m pip install --no-deps -c constraints.txt torchvision==0.28.0 diffusers monai \
        segmentation-models-pytorch timm torch_geometric x-transformers \
        einops einx frozendict loguru importlib_metadata zipp requests urllib3 charset_normalizer certifi psutil \
        xxhash aiohttp torch-einops-utils
    python tests/conformance/models.py --write          all that are installed; writes docs/coverage/models.md
    python tests/conformance/models.py monai vqmodel    those whose names contain one of these, printed

None of these libraries is a dependency of Partway: what is not installed is skipped, and the page says so. Each model
runs in a process of its own; out/models.jsonl has what was found, and `--write` goes on from there (`--fresh` forgets
it). A cell is right if the loss, every other output and every gradient are those of one device, in float64.
"""

from __future__ import annotations

import importlib
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from architectures import Cell, Reference, differences, in_a_process, in_double, tensors_in
from command import arguments
from torch import Tensor, nn

import partway as pw
from partway.strategy.errors import PartwayError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "out" / "models.jsonl"
PAGE = ROOT / "docs" / "coverage" / "models.md"
SECONDS = 1800  # for one model in all set-ups
BATCH, VOCABULARY = 8, 96


@dataclass(frozen=True)
class Model:
    """A model of a library.

    library   the package that it needs
    build     the module, in the default dtype
    inputs    its arguments by name
    inside    the dim of each argument that the set-up `inside` splits: rows of an image, positions of a sequence
    batch     the batch dim of each argument (0 by default)
    """

    library: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    inside: dict[str, int] = field(default_factory=dict)
    batch: dict[str, int | None] = field(default_factory=dict)


class Trained(nn.Module):
    """A model and a loss: the distance of the result from a target, and the mean squares of all other outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, target: Tensor, **inputs: Tensor) -> dict[str, Any]:
        outputs = [t for t in _tensors(self.model(**inputs)) if t.is_floating_point()]
        loss = nn.functional.mse_loss(outputs[0], target)
        for output in outputs[1:]:
            loss = loss + output.square().mean()
        return {"loss": loss, "outputs": outputs}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _tensors(list(vars(value).values()))


# -- Constructors ------------------------------------------------------------------------------------------------------


def of(module: str, name: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    """Makes `module.name(...)` with random weights."""

    def build() -> nn.Module:
        made: nn.Module = getattr(importlib.import_module(module), name)(*args, **kwargs)
        return made

    return build


def picture(name: str = "x", channels: int = 3, side: int = 32, dims: int = 2, many: int = BATCH) -> Any:
    return lambda: {name: torch.randn(many, channels, *[side] * dims)}


def tokens(name: str = "x", places: int = 8) -> Any:
    return lambda: {name: torch.randint(0, VOCABULARY, (BATCH, places))}


def noisy(channels: int = 4, side: int = 16, **more: tuple[int, ...]) -> Any:
    """Noisy latents, their time steps, and the other inputs of a denoiser."""
    return lambda: {
        "hidden_states" if "sample" not in more else "sample": torch.randn(BATCH, channels, side, side),
        "timestep": torch.randint(0, 1000, (BATCH,)),
        **{name: torch.randn(BATCH, *size) for name, size in more.items() if name != "sample"},
    }


class Graphs(nn.Module):
    """Two graph convolutions over the same edges."""

    def __init__(self, name: str, *, multilayer: bool = False, **options: Any) -> None:
        super().__init__()
        kind = getattr(importlib.import_module("torch_geometric.nn"), name)

        def layer() -> nn.Module:
            made: nn.Module = (
                kind(nn.Sequential(nn.Linear(16, 16), nn.ReLU())) if multilayer else kind(16, 16, **options)
            )
            return made

        self.layers = nn.ModuleList([layer(), layer()])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x, edge_index)) + x
        return x


def graph(name: str, **options: Any) -> Model:
    """A graph of 32 nodes with three neighbours each; "batch" splits the nodes."""

    def inputs() -> dict[str, Tensor]:
        return {"x": torch.randn(32, 16), "edge_index": torch.randint(0, 32, (2, 96))}

    return Model("torch_geometric", lambda: Graphs(name, **options), inputs, {"edge_index": 1}, {"edge_index": None})


class Dense(nn.Module):
    """Two dense graph convolutions."""

    def __init__(self) -> None:
        super().__init__()
        kind = importlib.import_module("torch_geometric.nn").DenseSAGEConv
        self.layers = nn.ModuleList([kind(16, 16), kind(16, 16)])

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x, adj))
        return x


class Decoder(nn.Module):
    """A decoder of x-transformers over token ids."""

    def __init__(self, kind: str = "Decoder", **options: Any) -> None:
        super().__init__()
        library = importlib.import_module("x_transformers")
        layers = getattr(library, kind)(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
        self.model = library.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=16, attn_layers=layers)

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


class Seen(nn.Module):
    """The image transformer of x-transformers."""

    def __init__(self) -> None:
        super().__init__()
        library = importlib.import_module("x_transformers")
        layers = library.Encoder(dim=32, depth=2, heads=4, attn_dim_head=8)
        self.model = library.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=8, attn_layers=layers)

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


class Continuous(nn.Module):
    """An encoder of x-transformers over vectors."""

    def __init__(self) -> None:
        super().__init__()
        library = importlib.import_module("x_transformers")
        layers = library.Encoder(dim=32, depth=2, heads=4, attn_dim_head=8, rotary_pos_emb=True, ff_glu=True)
        self.model = library.ContinuousTransformerWrapper(dim_in=16, dim_out=8, max_seq_len=16, attn_layers=layers)

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


ROWS = {"x": 2}
_UNET = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}


def _monai(
    name: str, *, side: int = 32, dims: int = 2, channels: int = 1, argument: str = "x", **options: Any
) -> Model:
    inside = {argument: 2}
    return Model("monai", of("monai.networks.nets", name, **options), picture(argument, channels, side, dims), inside)


def _segmentation(name: str, **options: Any) -> Model:
    build = of("segmentation_models_pytorch", name, "resnet18", encoder_weights=None, classes=3, **options)
    return Model("segmentation_models_pytorch", build, picture(side=64), ROWS)


def _timm(name: str, side: int = 64, **options: Any) -> Model:
    return Model("timm", of("timm", "create_model", name, num_classes=8, **options), picture(side=side), ROWS)


def _torchvision(name: str, side: int = 32, **options: Any) -> Model:
    return Model("torchvision", of("torchvision.models", name, **options), picture(side=side), ROWS)


def _x(name: str = "Decoder", **options: Any) -> Model:
    return Model("x_transformers", lambda: Decoder(name, **options), tokens(), {"x": 1})


MODELS: dict[str, Model] = {
    "AutoencoderKL": Model(
        "diffusers",
        of("diffusers", "AutoencoderKL", down_block_types=("DownEncoderBlock2D",) * 2,
           up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, **_UNET),
        picture("sample"),
        {"sample": 2},
    ),
    "AutoencoderTiny": Model(
        "diffusers",
        of("diffusers", "AutoencoderTiny", encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16),
           num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1)),
        picture("sample"),
        {"sample": 2},
    ),
    "DiTTransformer2DModel": Model(
        "diffusers",
        of("diffusers", "DiTTransformer2DModel", num_attention_heads=4, attention_head_dim=8, in_channels=4,
           num_layers=2, sample_size=16, patch_size=2, norm_num_groups=4, num_embeds_ada_norm=1000),
        lambda: {**noisy()(), "class_labels": torch.randint(0, 1000, (BATCH,))},
        {"hidden_states": 2},
    ),
    "SD3Transformer2DModel": Model(
        "diffusers",
        of("diffusers", "SD3Transformer2DModel", sample_size=16, patch_size=2, in_channels=4, num_layers=2,
           attention_head_dim=8, num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=32,
           pooled_projection_dim=16, out_channels=4, pos_embed_max_size=16),
        noisy(encoder_hidden_states=(6, 32), pooled_projections=(16,)),
        {"hidden_states": 2},
    ),
    "UNet1DModel": Model(
        "diffusers",
        of("diffusers", "UNet1DModel", sample_size=64, in_channels=2, out_channels=2, extra_in_channels=64,
           block_out_channels=(32, 32, 64), layers_per_block=1),
        lambda: {"sample": torch.randn(BATCH, 2, 64), "timestep": torch.randint(0, 1000, (BATCH,))},
        {"sample": 2},
    ),
    "UNet2DConditionModel": Model(
        "diffusers",
        of("diffusers", "UNet2DConditionModel", sample_size=16, cross_attention_dim=16, attention_head_dim=4,
           down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
           **_UNET),
        noisy(sample=(), encoder_hidden_states=(6, 16)),
        {"sample": 2},
    ),
    "UNet3DConditionModel": Model(
        "diffusers",
        of("diffusers", "UNet3DConditionModel", sample_size=8, cross_attention_dim=16, attention_head_dim=4,
           down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
           **_UNET),
        lambda: {
            "sample": torch.randn(BATCH, 4, 2, 8, 8),
            "timestep": torch.randint(0, 1000, (BATCH,)),
            "encoder_hidden_states": torch.randn(BATCH, 6, 16),
        },
        {"sample": 3},
    ),
    "VQModel": Model(
        "diffusers",
        of("diffusers", "VQModel", down_block_types=("DownEncoderBlock2D",) * 2,
           up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, num_vq_embeddings=16, **_UNET),
        picture("sample", side=16),
        {"sample": 2},
    ),
    "AttentionUnet": Model(
        "monai",
        of("monai.networks.nets", "AttentionUnet", spatial_dims=2, in_channels=1, out_channels=2, channels=(8, 16),
           strides=(2,)),
        picture(channels=1, side=16),
        ROWS,
    ),
    "BasicUNet": _monai("BasicUNet", spatial_dims=2, in_channels=1, out_channels=2, features=(8, 8, 16, 16, 16, 8)),
    "monai DenseNet": _monai(
        "DenseNet", spatial_dims=2, in_channels=1, out_channels=2, init_features=8, growth_rate=4, block_config=(2, 2)
    ),
    "DynUNet": _monai(
        "DynUNet", spatial_dims=2, in_channels=1, out_channels=2, kernel_size=(3, 3, 3), strides=(1, 2, 2),
        upsample_kernel_size=(2, 2), filters=(8, 16, 16), res_block=True,
    ),
    "SegResNet": _monai(
        "SegResNet", dims=3, side=16, spatial_dims=3, init_filters=8, in_channels=1, out_channels=2,
        blocks_down=(1, 1), blocks_up=(1,),
    ),
    "SwinUNETR": Model(
        "monai",
        of("monai.networks.nets", "SwinUNETR", in_channels=1, out_channels=2, feature_size=12, spatial_dims=2,
           depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8), window_size=4),
        picture("x_in", channels=1, side=64),
        {"x_in": 2},
    ),
    "monai UNet": Model(
        "monai",
        of("monai.networks.nets", "UNet", spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 16),
           strides=(2, 2), num_res_units=1),
        picture(channels=1, side=8, dims=3),
        ROWS,
    ),
    "UNETR": _monai(
        "UNETR", argument="x_in", in_channels=1, out_channels=2, img_size=32, feature_size=8, hidden_size=32,
        mlp_dim=64, num_heads=4, spatial_dims=2,
    ),
    "monai ViT": _monai(
        "ViT", in_channels=1, img_size=32, patch_size=8, hidden_size=32, mlp_dim=64, num_layers=2, num_heads=4,
        spatial_dims=2, classification=True, num_classes=8,
    ),
    "VNet": _monai("VNet", dims=3, side=16, spatial_dims=3, in_channels=1, out_channels=2, dropout_prob_down=0.0,
                   dropout_prob_up=(0.0, 0.0)),
    "smp DeepLabV3Plus": _segmentation("DeepLabV3Plus"),
    "smp FPN": _segmentation("FPN", decoder_dropout=0.0),
    "smp Linknet": _segmentation("Linknet"),
    "smp PSPNet": _segmentation("PSPNet", psp_dropout=0.0),
    "smp Unet": _segmentation("Unet", encoder_depth=3, decoder_channels=(16, 8, 8)),
    "smp UPerNet": _segmentation("UPerNet"),
    "timm test_convnext": _timm("test_convnext"),
    "timm test_efficientnet": _timm("test_efficientnet"),
    "timm test_resnet": _timm("test_resnet"),
    "timm test_vit": _timm("test_vit", img_size=64),
    "timm test_mambaout": _timm("test_mambaout"),
    "timm swin": _timm(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4),
        drop_path_rate=0.0, side=32,
    ),
    "torchvision resnet18": _torchvision("resnet18", num_classes=8),
    "torchvision shufflenet": _torchvision("shufflenet_v2_x0_5", num_classes=8),
    "torchvision squeezenet": _torchvision("squeezenet1_1", num_classes=8, dropout=0.0, side=64),
    "torchvision SwinTransformer": _torchvision(
        "SwinTransformer", patch_size=[4, 4], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4],
        stochastic_depth_prob=0.0, num_classes=8,
    ),
    "torchvision VisionTransformer": _torchvision(
        "VisionTransformer", image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64,
        num_classes=8,
    ),
    "GATConv": graph("GATConv", heads=2, concat=False, add_self_loops=False),
    "GCNConv": graph("GCNConv"),
    "GINConv": graph("GINConv", multilayer=True),
    "GraphConv": graph("GraphConv"),
    "SAGEConv": graph("SAGEConv"),
    "TransformerConv": graph("TransformerConv", heads=2, concat=False),
    "DenseSAGEConv": Model(
        "torch_geometric", Dense, lambda: {"x": torch.randn(BATCH, 8, 16), "adj": torch.rand(BATCH, 8, 8)},
        {"x": 1, "adj": 1},
    ),
    "x-transformers decoder": _x(),
    "x-transformers rotary, GLU, RMSNorm": _x(rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True),
    "x-transformers ALiBi": _x(alibi_pos_bias=True),
    "x-transformers encoder": _x("Encoder", rel_pos_bias=True),
    "x-transformers image transformer": Model("x_transformers", Seen, picture("x"), ROWS),
    "x-transformers of vectors": Model(
        "x_transformers", Continuous, lambda: {"x": torch.randn(BATCH, 8, 16)}, {"x": 1}
    ),
}  # fmt: skip


# -- Set-ups -----------------------------------------------------------------------------------------------------------


def _batches(model: Model, inputs: dict[str, Tensor], axis: str) -> dict[str, Any]:
    dims = {name: model.batch.get(name, 0) for name in inputs}
    return _split_along(inputs, {name: dim for name, dim in dims.items() if dim is not None}, axis)


def _split_along(inputs: dict[str, Tensor], dims: dict[str, int], axis: str) -> dict[str, Any]:
    return {name: tuple(axis if d == dim else None for d in range(inputs[name].ndim)) for name, dim in dims.items()}


def weights_split(module: nn.Module, axis: str, count: int) -> dict[str, Any]:
    """`parameter_plan` for every second matrix: its longer dim that this number of devices divides."""
    plan = {}
    matrices = [(n, p) for n, p in module.named_parameters() if p.ndim >= 2]
    for name, parameter in matrices[::2]:
        dims = [d for d in range(parameter.ndim) if parameter.shape[d] % count == 0]
        if dims:
            longest = max(dims, key=lambda d: parameter.shape[d])
            plan[name] = tuple(axis if d == longest else None for d in range(parameter.ndim))
    return plan


def _all_batches(model: Model, module: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Any]:
    return {"mesh": {"dp": 8}, "in_strategy": _batches(model, inputs, "dp")}


def _both(model: Model, module: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Any]:
    plan = weights_split(module, "tp", 4) or None
    return {"mesh": {"dp": 2, "tp": 4}, "in_strategy": _batches(model, inputs, "dp"), "parameter_plan": plan}


def _inside(model: Model, module: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Any]:
    return {"mesh": {"sp": 4}, "in_strategy": _split_along(inputs, model.inside, "sp")}


SETUPS: dict[str, Callable[..., dict[str, Any]]] = {"batch": _all_batches, "2 x 4": _both, "inside": _inside}


# -- One model ---------------------------------------------------------------------------------------------------------


def missing(library: str) -> str:
    """The reason why a library cannot be used here; '' if it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(library)
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def without_kernels() -> None:
    """Declare torchvision's operators: a wheel for another torch version lacks them, and then the library cannot be
    imported. The models do not call them."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            schema = f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(*schema)


def made(name: str) -> tuple[Model, nn.Module, dict[str, Tensor]]:
    """A model in training mode, in float64, without dropout, and its inputs with a target."""
    model = MODELS[name]
    torch.manual_seed(0)
    module = in_double(model.build().double().train())
    for part in module.modules():
        if isinstance(part, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            part.p = 0.0
        if getattr(part, "dropout_prob", None):  # diffusers' labels
            part.dropout_prob = 0.0  # type: ignore[assignment]
    torch.manual_seed(1)
    inputs = model.inputs()
    with torch.no_grad():
        first = next(t for t in _tensors(module.eval()(**inputs)) if t.is_floating_point())
    return model, Trained(module.train()), {**inputs, "target": torch.randn(first.shape)}


def trained(module: nn.Module, inputs: dict[str, Tensor]) -> Reference:
    result = module(**inputs)
    result["loss"].backward()
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
    buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
    return Reference({**dict(tensors_in(result)), **buffers}, gradients)


def cells(name: str) -> Iterator[Cell]:
    """The results of one model in each of its set-ups."""
    torch.set_default_dtype(torch.float64)
    without_kernels()
    if reason := missing(MODELS[name].library):
        yield Cell(name, "", "skipped", reason)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, module, inputs = made(name)
        expected = trained(module, inputs)
        for setup in setups_of(name):
            yield _cell(name, setup, expected)


def _cell(name: str, setup: str, expected: Reference) -> Cell:
    model, module, inputs = made(name)
    started = time.perf_counter()
    given = {n: t for n, t in inputs.items() if n != "target"}
    try:
        sharded: Any = pw.shard(module, **SETUPS[setup](model, module, given))
        found = trained(sharded, inputs)
    except PartwayError as error:
        return Cell(name, setup, "refused", f"{type(error).__name__}: {error}")
    except Exception as error:
        return Cell(name, setup, "WRONG", f"{type(error).__name__}: {error}")
    seconds, plan, wrong = time.perf_counter() - started, sharded.plan, differences(found, expected)
    return Cell(
        name, setup, "WRONG" if wrong else "right", "; ".join(wrong[:3]), sorted(plan.unknown_operators),
        len(plan.collectives), len(plan.operators), seconds,
    )  # fmt: skip


def setups_of(name: str) -> list[str]:
    return [setup for setup in SETUPS if setup != "inside" or MODELS[name].inside]


def run(name: str) -> list[Cell]:
    """Run `cells` in its own process."""
    found = in_a_process(name, SECONDS, cells, setups_of(name))
    skipped = [cell for cell in found if cell.status == "skipped"]
    return skipped or found


# -- All of them -------------------------------------------------------------------------------------------------------


def kept() -> dict[str, list[Cell]]:
    """The earlier results."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    known: dict[str, list[Cell]] = {}
    for line in lines:
        entry = json.loads(line)
        known[entry["name"]] = [Cell(**cell) for cell in entry["cells"]]
    return known


_HEAD = """# Models of other libraries

Written by `python tests/conformance/models.py --write`; do not edit. torch {torch}{versions}.

{count} models, small and random, in training, on simulated devices:

| set-up | mesh | annotated |
| --- | --- | --- |
| batch | 8 | the batch dim of every input (of graphs, the nodes) |
| 2 x 4 | 2 x 4 | the batch over one axis; every second matrix over the other, along its longest dim |
| inside | 4 | the rows of images, the positions of sequences, the edges of graphs |

All other layouts are inferred. A cell is **right** if its loss, outputs, buffers and gradients equal those of one
device in float64, to 1e-10. It also has the number of collectives of a step, and the seconds of the first step on one
core (capture, planning, and the step itself on all ranks in one process). `fallbacks` are operators without a rule,
which run replicated.

{totals}
"""


def page(known: dict[str, list[Cell]]) -> str:
    every = [cell for name in MODELS for cell in known.get(name, [])]
    counts = Counter(cell.status for cell in every)
    totals = f"Of {len(every)} cells {counts['right']} are right, {counts['refused']} are refused, "
    totals += f"{counts['WRONG']} are wrong" + (f", {counts['skipped']} are skipped." if counts["skipped"] else ".")
    libraries = sorted({model.library for model in MODELS.values()})
    versions = "".join(f", {library} {version}" for library in libraries if (version := _version(library)))
    lines = [_HEAD.format(torch=torch.__version__.split("+")[0], versions=versions, count=len(MODELS), totals=totals)]
    for library in libraries:
        lines += [f"## {library}", "", f"| model | operators | {' | '.join(SETUPS)} | fallbacks |"]
        lines += ["| --- | --- |" + " --- |" * (len(SETUPS) + 1)]
        lines += [_line(name, known.get(name, [])) for name, model in MODELS.items() if model.library == library]
        lines += [""]
    others = [cell for cell in every if cell.status != "right"]
    if others:
        lines += ["## Not right", ""]
        reasons: dict[tuple[str, str, str], list[str]] = {}
        for cell in others:
            reasons.setdefault((cell.name, cell.status, " ".join(cell.reason.split())[:400]), []).append(cell.setup)
        lines += [f"- {name} ({', '.join(found)}): {status}. {why}" for (name, status, why), found in reasons.items()]
        lines += [""]
    return "\n".join(lines)


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""


def _line(name: str, found: list[Cell]) -> str:
    by_setup = {cell.setup: cell for cell in found}
    columns = []
    for setup in SETUPS:
        cell = by_setup.get(setup) or by_setup.get("")
        if cell is None:
            columns.append("" if found else "not run")
        else:
            right = cell.status == "right"
            columns.append(f"right, {cell.collectives}, {cell.seconds:.0f} s" if right else cell.status)
    fallbacks = sorted({f"`{operator.removeprefix('aten.')}`" for cell in found for operator in cell.fallbacks})
    operators = max((cell.operators for cell in found), default=0)
    return f"| {name} | {operators} | {' | '.join(columns)} | {', '.join(fallbacks)} |"


def chosen(wanted: Sequence[str]) -> list[str]:
    """The models with these names, or whose name or library contains one of them, in the order of `wanted`."""
    found = []
    for text in wanted:
        inside = [n for n, m in MODELS.items() if text.lower() in f"{n} {m.library}".lower()]
        found += [text] if text in MODELS else inside
    return list(dict.fromkeys(found))


def main() -> None:
    given = arguments(__doc__, RESULTS)
    known = kept()
    names = chosen(given.names) if given.names else [n for n in MODELS if n not in known]
    with ThreadPoolExecutor(2) as pool:
        for ran in as_completed([pool.submit(run, name) for name in names]):
            found = ran.result()
            with RESULTS.open("a") as file:
                file.write(json.dumps({"name": found[0].name, "cells": [asdict(cell) for cell in found]}) + "\n")
            print("".join(f"{cell}\n" for cell in found), end="", flush=True)
    if given.write:
        PAGE.write_text(page(kept()))


if __name__ == "__main__":
    main()
