"""Pre-train the tiny backbone on the pre-training classes of Split Glyphs.

    python -m arc_cl.engine.pretrain_glyphs --out src/arc_cl/backbones/weights/glyph_vit.safetensors

The classes share no character with the benchmark or the tuning classes, and only the training
faces are drawn. The defaults made the file that ships, on two CPU cores; a GPU is used when there
is one. The file carries the command, seed, versions and accuracies (`test` = held-out faces).
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from arc_cl.backbones.tiny import glyph_vit, normalise
from arc_cl.contracts import Split
from arc_cl.data.glyphs.classes import CLASSES
from arc_cl.data.glyphs.fonts import check_fonts
from arc_cl.data.sources.glyphs import render
from arc_cl.engine.provenance import versions

TEST_IMAGES = 30
WARM_UP = 0.05  # share of all steps
CHUNK = 25  # classes that a process draws at a time
EASY = 0.5  # share of the epochs in which the images grow as varied as they are in the benchmark


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    check_fonts()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backbone = glyph_vit(pretrained=False, seed=options.seed)
    model = nn.Sequential(backbone, _zero_head(backbone.num_features)).to(device)
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        _fit(model, pool, device, options)
        accuracies = {
            f"{split}_accuracy": _accuracy(model, _draw(pool, split, TEST_IMAGES, 0, 1), device)
            for split in get_args(Split)
        }
    _print(str(accuracies))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    state = {name: value.cpu().contiguous() for name, value in backbone.state_dict().items()}
    options.out.write_bytes(save(state, _provenance(options, device, accuracies)))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m arc_cl.engine.pretrain_glyphs")
    parser.add_argument("--out", type=Path, required=True, help="file of weights to write")
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--images", type=int, default=50, help="fresh ones, a class and epoch")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="that draw the images")
    return parser.parse_args(arguments)


def _zero_head(features: int) -> nn.Linear:
    """Zeros draw nothing from the global generator."""
    classes = len(CLASSES["pretraining"])
    head = nn.Linear(features, classes, device="meta").to_empty(device="cpu")
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _draw(pool: Executor, split: Split, count: int, first: int, variety: float) -> Tensor:
    """Images [K,N,H,W,3] of the pre-training classes, drawn by all processes of the pool."""
    job = partial(render, split=split, count=count, first=first, variety=variety)
    characters = CLASSES["pretraining"]
    chunks = [characters[start : start + CHUNK] for start in range(0, len(characters), CHUNK)]
    images = np.concatenate([*pool.map(job, chunks)])
    return torch.from_numpy(images.reshape(len(characters), count, *images.shape[1:]))


def _fit(
    model: nn.Module, pool: Executor, device: torch.device, options: argparse.Namespace
) -> None:
    """AdamW on a cosine; every epoch draws new images, at first with little variety.

    From the full variety a transformer learns nothing for tens of thousands of images.
    """
    fused = torch.compile(model) if device.type == "cuda" else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.lr, weight_decay=options.weight_decay
    )
    total = options.epochs * len(CLASSES["pretraining"]) * options.images // options.batch_size
    schedule = LambdaLR(optimizer, lambda step: _cosine(step / total))
    order = torch.Generator().manual_seed(options.seed)
    model.train()
    for epoch in range(options.epochs):
        variety = min(1.0, (epoch + 1) / (EASY * options.epochs))
        data = _draw(pool, "train", options.images, epoch * options.images, variety).to(device)
        losses = [
            _step(fused, optimizer, schedule, images, labels, options.label_smoothing)
            for images, labels in _batches(data, options.batch_size, order)
        ]
        _print(f"epoch {epoch + 1}: variety {variety:.2f}, loss {torch.stack(losses).mean():.3f}")


def _step(
    model: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    schedule: LambdaLR,
    images: Tensor,
    labels: Tensor,
    label_smoothing: float,
) -> Tensor:
    with torch.autocast(images.device.type, torch.bfloat16):
        loss = cross_entropy(model(normalise(images)), labels, label_smoothing=label_smoothing)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    return loss.detach()


def _cosine(done: float) -> float:
    return min(done / WARM_UP, 0.5 * (1 + math.cos(math.pi * done)))


def _batches(
    data: Tensor, batch_size: int, order: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled images and labels; the last, incomplete batch is left out."""
    classes, count = data.shape[:2]
    images = data.flatten(0, 1)
    rows = torch.randperm(classes * count, generator=order).to(data.device)
    for start in range(0, len(rows) - batch_size + 1, batch_size):
        chosen = rows[start : start + batch_size]
        yield images[chosen], chosen // count


@torch.inference_mode()
def _accuracy(model: nn.Module, data: Tensor, device: torch.device) -> float:
    model.eval()
    right = [
        (model(normalise(images.to(device))).argmax(1) == label).float().mean()
        for label, images in enumerate(data)
    ]
    return torch.stack(right).mean().item()


def _provenance(
    options: argparse.Namespace, device: torch.device, accuracies: dict[str, float]
) -> dict[str, str]:
    return {
        "command": shlex.join(["python", "-m", "arc_cl.engine.pretrain_glyphs", *sys.argv[1:]]),
        **{name: str(value) for name, value in vars(options).items() if name != "out"},
        **{name: str(versions()[name]) for name in ("torch", "timm", "numpy")},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        **{name: f"{value:.4f}" for name, value in accuracies.items()},
    }


def _print(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    main()
