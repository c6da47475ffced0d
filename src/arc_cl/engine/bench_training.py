"""How fast each learner trains, beside plain timm in the same run.

A step is `engine.fit`'s own on images that lie on the device: normalising, loss, backward pass,
optimiser; all but reading data. Each learner is in its second task, at its released batch size.
*Plain* is the same backbone with a linear head, forward and backward pass, compiled the same way.
The prompt learners' *bound* is what they cannot do without: timm's forward pass for the query, and
one with as many tokens as theirs whose backward pass makes gradients of activations alone.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from arc_cl import catalogue
from arc_cl.backbones.heads import feature_count, grow_linear
from arc_cl.backbones.timm_models import load
from arc_cl.contracts import AsksFirst, Learner, TaskInfo, Training
from arc_cl.engine.bench import Figure, seconds_of
from arc_cl.engine.fit import Losses, Progressed, TaskData, compile_if_asked, fit
from arc_cl.engine.images import Appearance, DeviceImages, Normalisation
from arc_cl.engine.progress import Silent
from arc_cl.engine.runtime import Runtime
from arc_cl.errors import RecordError
from arc_cl.experiments.fields import build

SHARE, TIMES = 0.80, 8.0
"""Asked of the prompt learners: of their bound, and over the released code in the same call."""
_CLASSES, _TASKS, _SIZE, _REPEATS = 10, 10, 224, 3


@dataclass(frozen=True)
class Bench:
    """What is measured: a backbone, in one precision, for so many steps each."""

    backbone: str
    runtime: Runtime
    steps: int

    @property
    def name(self) -> str:
        return f"{self.backbone}, {self.runtime.precision}"


def speeds_of(path: Path | None) -> dict[str, float]:
    """Images a second of the released code, as `benchmarks/released.py` wrote them."""
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["images/s"]
        speeds = {str(name): float(speed) for name, speed in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(
            f"cannot read speeds of the released code from {path}: {error!r}; make it by "
            f"benchmarks/released.py"
        ) from error
    return speeds


def measure_training(
    bench: Bench, settings: Mapping[str, Mapping[str, Any]], released: Mapping[str, float]
) -> Iterator[Figure]:
    """All figures, one after another; `settings` are of the recipes."""
    for name, speed in released.items():
        yield Figure(f"{name}, released code", speed, "images/s")
    backbone = load(bench.backbone, "random").module
    plain: dict[int, float] = {}
    for name, values in settings.items():
        module = catalogue.load("learners", name)
        chosen: Training = build(module.Settings, values, f"the recipe for {name}")
        chosen = replace(chosen, epochs_first=1, epochs=1)
        learner: Learner = module.create(copy.deepcopy(backbone), chosen)
        batch_size = chosen.batch_size
        title = f"{name}, batch {batch_size}, {bench.name}"
        speed = _fit_speed(bench, learner, batch_size)
        yield Figure(title, speed, "images/s")
        if batch_size not in plain:
            plain[batch_size] = _speed(bench, Plain(copy.deepcopy(backbone)), batch_size)
            alone = f"plain forward + backward, batch {batch_size}, {bench.name}"
            yield Figure(alone, plain[batch_size], "images/s")
        yield Figure(f"{title}: of plain forward + backward", speed / plain[batch_size], "")
        if isinstance(learner, AsksFirst):
            tokens = values["top_k"] * values["prompt_length"] if "top_k" in values else 0
            bound = _speed(bench, Bound(copy.deepcopy(backbone), tokens), batch_size)
            yield Figure(f"{title}: of its bound", speed / bound, "", SHARE)
        if name in released:
            yield Figure(f"{title}: over the released code", speed / released[name], "x", TIMES)


class Plain(nn.Module):
    """A backbone with a linear head, all of it trained."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        width = feature_count(backbone)
        self.head = grow_linear(None, width, _CLASSES, torch.Generator().manual_seed(0))

    def forward(self, images_BCHW: Tensor, labels_B: Tensor) -> Tensor:
        loss: Tensor = cross_entropy(self.head(self.backbone(images_BCHW)), labels_B)
        return loss


class Bound(nn.Module):
    """What a prompt learner cannot do without, from timm's own pieces."""

    def __init__(self, backbone: nn.Module, tokens: int) -> None:
        super().__init__()
        self.backbone = backbone.requires_grad_(False)
        width = feature_count(backbone)
        self.shift = nn.Parameter(torch.zeros(1, 1, width))
        self.tokens = nn.Parameter(torch.zeros(1, tokens, width))

    def forward(self, images_BCHW: Tensor, labels_B: Tensor) -> Tensor:
        vit: Any = self.backbone
        with torch.no_grad():
            query_BD = vit(images_BCHW)
        embedded_BND = vit._pos_embed(vit.patch_embed(images_BCHW)) + self.shift
        prompts_BPD = self.tokens.to(embedded_BND.dtype).expand(len(images_BCHW), -1, -1)
        tokens_BND = vit.norm(vit.blocks(torch.cat([embedded_BND, prompts_BPD], dim=1)))
        loss: Tensor = (tokens_BND.float().mean(dim=1) * query_BD.float()).mean()
        return loss


def _fit_speed(bench: Bench, learner: Learner, batch_size: int) -> float:
    """Images a second of `engine.fit` in the second task."""
    images, labels_N = _images(bench, batch_size)
    learner.modules().to(bench.runtime.device)
    for index in range(2):
        task = TaskInfo(
            index=index,
            seen_classes=_CLASSES * (index + 1),
            new_classes=_CLASSES,
            tasks=_TASKS,
            classes=_CLASSES * _TASKS,
        )
        learner.begin_task(task, bench.runtime.generator("init", index))
    numbers_N = torch.arange(len(images), device=bench.runtime.device)
    data = TaskData(images, numbers_N, labels_N + _CLASSES)
    losses = Losses(bench.runtime)

    def train() -> None:
        fit(bench.runtime, learner, task, data, losses, Forgetful(), Silent())

    return len(images) / _median_seconds(train)


def _speed(bench: Bench, module: nn.Module, batch_size: int) -> float:
    """Images a second of a loss's forward and backward pass."""
    images, labels_N = _images(bench, batch_size)
    compile_if_asked(bench.runtime, module)
    loss_of = bench.runtime.fabric.setup_module(module)
    batch = images.at_test(torch.arange(batch_size, device=bench.runtime.device))

    def steps() -> None:
        for _ in range(bench.steps):
            torch.compiler.cudagraph_mark_step_begin()
            loss = loss_of(batch, labels_N[:batch_size])
            for parameter in loss_of.parameters():
                parameter.grad = None
            bench.runtime.fabric.backward(loss)

    return bench.steps * batch_size / _median_seconds(steps)


def _median_seconds(work: Callable[[], None]) -> float:
    work()
    work()
    return median(seconds_of(work) for _ in range(_REPEATS))


def _images(bench: Bench, batch_size: int) -> tuple[DeviceImages, Tensor]:
    """Random ones on the device, enough for all steps, and labels from 0."""
    count = batch_size * bench.steps
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (count, _SIZE, _SIZE, 3), dtype=np.uint8)
    appearance = Appearance("as_stored", _SIZE, Normalisation((0.5,) * 3, (0.5,) * 3))
    labels_N = torch.arange(count, device=bench.runtime.device) % _CLASSES
    return DeviceImages(pixels, appearance, bench.runtime.device), labels_N


class Forgetful:
    """Keeps nothing."""

    def left_at(self, module: nn.Module, optimizer: Optimizer) -> Progressed:
        return Progressed()

    def step_done(self, module: nn.Module, optimizer: Optimizer, at: Progressed) -> None: ...

    def epoch_done(self, epoch: int, means: Mapping[str, float], images: int) -> None: ...
