"""The features of a stage's test stream: computed once, read by every head-only method.

`features/03.safetensors` holds, class by class in class order, features [N,D], the index of each
image in the test split and its label (the position of its class). It remembers the checksum of
the checkpoint that it was computed from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from arc_cl.contracts import Adaptable, LabelledImages, Learner
from arc_cl.engine.images import DeviceImages
from arc_cl.engine.progress import Progress
from arc_cl.engine.sequence import Run, stages
from arc_cl.errors import RecordError

_BATCH = 500


@dataclass(frozen=True)
class StageFeatures:
    """The test stream of one stage, as a head sees it."""

    stage: int
    features_ND: Tensor
    indices_N: NDArray[np.int64]
    labels_N: NDArray[np.int64]

    def rearranged(self, order_N: Tensor) -> StageFeatures:
        """The same images in another order."""
        order = order_N.numpy()
        return replace(
            self,
            features_ND=self.features_ND[order_N],
            indices_N=self.indices_N[order],
            labels_N=self.labels_N[order],
        )


def store_features(run: Run, learner: Learner, data: LabelledImages, progress: Progress) -> None:
    """Read every checkpoint of a run and write the features of its test stream."""
    progress.phase("Test features", run.stages)
    images = DeviceImages(data.images_NHWC, run.normalisation, run.runtime.device)
    for meta in stages(run, learner):
        indices_N = run.scenario.test_indices(data.labels_N, meta.stage)
        features_ND = _extract(learner.adaptable(), images, torch.from_numpy(indices_N), progress)
        tensors = {
            "features": features_ND,
            "indices": torch.from_numpy(indices_N),
            "labels": torch.from_numpy(run.scenario.positions(data.labels_N[indices_N])),
        }
        path = _path(run.folder, meta.stage)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        save_file(tensors, partial, metadata={"checkpoint": meta.sha256})
        partial.replace(path)


def load_features(run: Path, stage: int, checkpoint: str) -> StageFeatures:
    """The stored features of one stage, which must be of the checkpoint with that checksum."""
    path = _path(run, stage)
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("checkpoint") != checkpoint:
                raise ValueError("they were computed from another checkpoint")
            features_ND, indices_N, labels_N = (
                file.get_tensor(name) for name in ("features", "indices", "labels")
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise RecordError(f"cannot use the features {path}: {error}; store them again") from error
    return StageFeatures(stage, features_ND, indices_N.numpy(), labels_N.numpy())


@torch.inference_mode()
def _extract(
    adaptable: Adaptable, images: DeviceImages, indices_N: Tensor, progress: Progress
) -> Tensor:
    batches = []
    for indices_B in torch.split(indices_N, _BATCH):
        batches.append(adaptable.features(images.batch(indices_B)).cpu())
        progress.advance(len(indices_B) / len(indices_N), len(indices_B))
    return torch.cat(batches)


def _path(run: Path, stage: int) -> Path:
    return run / "features" / f"{stage:02d}.safetensors"
