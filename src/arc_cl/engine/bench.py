"""How fast replay is: beside the floor that matrix products set, beside plain autograd, and beside
the backbone's forward pass whose features it consumes. All in one run on one machine.

The floor, on one CPU core: for each block of 64 rows the logits, the Gram matrix and the update of
the head, and nothing else. "Every sample retained": all rows are confident and in past tasks, so
that each batch makes its step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from arc_cl.backbones.timm_models import load
from arc_cl.core.plugin import ARC
from arc_cl.core.settings import ARCSettings
from arc_cl.engine.provenance import provenance

CLASSES, WIDTH, SAMPLES = 100, 768, 10_240
_FLOOR_BLOCK = 64
_TASKS = [10] * 10
Compared = Literal["at least", "at most"]


@dataclass(frozen=True)
class Figure:
    """One measured number, and what is asked of it."""

    name: str
    value: float
    unit: str
    target: float | None = None
    compared: Compared = "at least"

    @property
    def holds(self) -> bool | None:
        if self.target is None:
            return None
        if self.compared == "at least":
            return self.value >= self.target
        return self.value <= self.target

    def __str__(self) -> str:
        line = f"{self.name:<46} {self.value:>11,.4g} {self.unit}"
        if self.value >= 1000:
            line = f"{self.name:<46} {self.value:>11,.0f} {self.unit}"
        if self.target is None:
            return line
        verdict = "holds" if self.holds else "MISSED"
        return f"{line}  ({self.compared} {self.target:,g}: {verdict})"


def measure(device: torch.device) -> Iterator[Figure]:
    """All figures of this machine, one after another; of its GPU too where that is the device."""
    yield from cpu_replay()
    yield from cpu_overhead()
    if device.type == "cuda":
        yield from gpu_replay(device)
        yield from gpu_overhead(device)


def recorded(figures: list[Figure], device: torch.device, command: str) -> dict[str, Any]:
    """Figures with their origin, fit for JSON."""
    rows = [{**asdict(figure), "holds": figure.holds} for figure in figures]
    return {"provenance": provenance(device, command), "figures": rows}


def cpu_replay() -> list[Figure]:
    """Samples a second on one core, at K = 100 and D = 768."""
    with threads(1):
        features, head = every_sample_retained(torch.device("cpu"))
        floor = SAMPLES / fastest(lambda: _floor(features, head))
        figures = [Figure("floor of matrix products, one core", floor, "samples/s")]
        for batch_size, share in ((1, 0.60), (16, 0.50)):
            name = f"SGD with momentum, batch {batch_size}"
            speed = replay_speed(features, head, batch_size, ARCSettings.paper(beta=0.0))
            figures.append(Figure(f"{name}, one core", speed, "samples/s"))
            figures.append(Figure(f"{name}: share of the floor", speed / floor, "", share))
        adam = ARCSettings.paper(beta=0.0, optimizer="adam")
        speed = replay_speed(features, head, 1, adam)
        figures.append(Figure("Adam, batch 1, one core", speed, "samples/s", 15_000))
        speed = autograd_speed(features[:512], head)
        figures.append(Figure("plain autograd, SGD, batch 1, one core", speed, "samples/s"))
    return figures


def cpu_overhead() -> list[Figure]:
    """What ARC adds to a ViT-B/16's forward pass of a batch of 64, with batch-1 semantics."""
    model = load("vit_base_patch16_224", "random").module
    images = torch.rand(64, 3, 224, 224)
    with torch.inference_mode():
        features = model(images[:2])
        forward = fastest(lambda: model(images), repeats=2)
    features = torch.randn(64, features.shape[1])
    arc = ARC(nn.Linear(WIDTH, CLASSES), tasks=_TASKS, settings=ARCSettings.paper(beta=0.0))
    arc.replay(features)
    added = 100 * fastest(lambda: arc.replay(features), repeats=20) / forward
    return [
        Figure("ViT-B/16 forward, batch 64, CPU", 64 / forward, "images/s"),
        Figure("ARC on top of it", added, "% more time", 0.05, "at most"),
    ]


def gpu_replay(device: torch.device) -> list[Figure]:
    """Samples a second with the features resident."""
    features, head = every_sample_retained(device)
    figures = []
    for batch_size, target in ((1, 200_000.0), (16, None)):
        speed = replay_speed(features, head, batch_size, ARCSettings.paper(beta=0.0))
        name = f"SGD with momentum, batch {batch_size}, GPU"
        figures.append(Figure(name, speed, "samples/s", target))
    speed = autograd_speed(features[:512], head)
    return [*figures, Figure("plain autograd, SGD, batch 1, GPU", speed, "samples/s")]


def gpu_overhead(device: torch.device) -> list[Figure]:
    """What ARC adds to a ViT-B/16's bf16 forward pass, on a stream of its own beside it."""
    model = load("vit_base_patch16_224", "random").module.to(device, torch.bfloat16)
    images = torch.rand(256, 3, 224, 224, device=device, dtype=torch.bfloat16)
    arc = ARC(nn.Linear(WIDTH, CLASSES, device=device), tasks=_TASKS,
              settings=ARCSettings.paper(beta=0.0))  # fmt: skip
    side = torch.cuda.Stream(device)
    batches = 80

    def alone() -> None:
        with torch.inference_mode():
            for _ in range(batches):
                model(images)

    def with_arc() -> None:
        with torch.inference_mode():
            waiting = _pass(model, images)
            for i in range(batches):
                # The next pass is under way before ARC waits for this one.
                following = _pass(model, images) if i + 1 < batches else waiting
                features, done = waiting
                side.wait_event(done)
                features.record_stream(side)
                with torch.cuda.stream(side):
                    arc.replay(features)
                waiting = following

    forward = fastest(alone, repeats=4)
    added = 100 * (fastest(with_arc, repeats=4) / forward - 1)
    return [
        Figure("ViT-B/16 forward, bf16, batch 256, GPU", 256 * batches / forward, "images/s"),
        Figure("ARC beside it", added, "% more time", 1.0, "at most"),
    ]


def _pass(model: nn.Module, images: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Features, and the moment from which they hold."""
    features = model(images)
    done = torch.cuda.Event()
    done.record()
    return features, done


def every_sample_retained(device: torch.device) -> tuple[Tensor, nn.Linear]:
    """Random features, and a head that never predicts the newest task."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(WIDTH, CLASSES)
    with torch.no_grad():
        head.weight.copy_(torch.randn(CLASSES, WIDTH, generator=generator) / WIDTH**0.5)
        head.bias.zero_()
        head.bias[-_TASKS[-1] :] = -20.0
    features = torch.randn(SAMPLES, WIDTH, generator=generator)
    return features.to(device), head.to(device)


def replay_speed(
    features: Tensor, head: nn.Linear, batch_size: int, settings: ARCSettings
) -> float:
    """Samples a second of `ARC.replay`, decisions included."""
    arc = ARC(head, tasks=_TASKS, settings=settings)

    def replay() -> None:
        arc.reset()
        if not bool(arc.replay(features, batch_size=batch_size).retained.all()):
            raise AssertionError("the benchmark must retain every sample")

    return len(features) / fastest(replay)


def autograd_speed(features: Tensor, head: nn.Linear) -> float:
    """Samples a second of the same updates by loss.backward() and torch.optim.SGD."""
    model = nn.Linear(WIDTH, CLASSES).to(features.device)
    model.load_state_dict(head.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def descend() -> None:
        for row in features.split(1):
            log_p = model(row).log_softmax(dim=1)
            loss = -log_p.amax(dim=1).mean() - (log_p.exp() * log_p).sum(dim=1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return len(features) / fastest(descend, repeats=2)


def fastest(work: Callable[[], object], repeats: int = 10) -> float:
    """The shortest of some runs, in seconds, after one to warm up."""
    work()
    return min(seconds_of(work) for _ in range(repeats))


def seconds_of(work: Callable[[], object]) -> float:
    _wait()
    start = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _floor(features: Tensor, head: nn.Linear) -> None:
    weight = head.weight.detach().clone()
    gradient = torch.full((_FLOOR_BLOCK, CLASSES), 1e-9)
    logits = torch.empty(_FLOOR_BLOCK, CLASSES)
    gram = torch.empty(_FLOOR_BLOCK, _FLOOR_BLOCK)
    for block in features.split(_FLOOR_BLOCK):
        torch.mm(block, weight.T, out=logits)
        torch.mm(block, block.T, out=gram)
        weight.addmm_(gradient.T, block)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
