"""The features of a stage's test stream: computed once, read by every head-only method.

`features/03.safetensors` holds, class by class in class order, features [N,D], the index of each
image in the test split and its label (the position of its class). It remembers the checksum of
the checkpoint that it was computed from.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from arc_cl.contracts import AsksFirst, LabelledImages, Learner
from arc_cl.core.detection import at_least_float32
from arc_cl.engine.checkpoints import StageMeta, read_meta
from arc_cl.engine.images import DeviceImages
from arc_cl.engine.queries import Queries
from arc_cl.engine.sequence import Run
from arc_cl.engine.whole import written_whole
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


class TestSplit:
    """The test images on the device, and what a learner asked about them before."""

    def __init__(self, run: Run, data: LabelledImages) -> None:
        self.run = run
        self._images = DeviceImages(data.images_NHWC, run.appearance, run.runtime.device)
        self._labels_N = data.labels_N
        self._positions_N = run.scenario.positions(data.labels_N)
        self._queries: Queries | None = None

    def features(self, learner: Learner, stage: int) -> StageFeatures:
        """Of the images of all classes seen after a stage, class by class."""
        indices_N = self.run.scenario.test_indices(self._labels_N, stage)
        numbers_N = torch.from_numpy(indices_N)
        features_ND = self._extract(learner, numbers_N)
        return StageFeatures(stage, features_ND, indices_N, self._positions_N[indices_N])

    @torch.inference_mode()
    def _extract(self, learner: Learner, numbers_N: Tensor) -> Tensor:
        if isinstance(learner, AsksFirst):
            self._prepare(learner, numbers_N)
        batches = []
        for numbers_B in torch.split(numbers_N.to(self.run.runtime.device), _BATCH):
            with self.run.runtime.fabric.autocast():
                batches.append(self._of_batch(learner, numbers_B).cpu())
        return at_least_float32(torch.cat(batches))

    def _prepare(self, learner: AsksFirst, numbers_N: Tensor) -> None:
        """Queries do not change from stage to stage, nor from one copy of a learner to another."""
        if self._queries is None:
            self._queries = Queries(self.run.runtime, learner, self._images)
        self._queries.prepare(numbers_N)

    def _of_batch(self, learner: Learner, numbers_B: Tensor) -> Tensor:
        images_BCHW = self._images.at_test(numbers_B)
        if isinstance(learner, AsksFirst) and self._queries is not None:
            return learner.features_given(images_BCHW, self._queries.of(numbers_B))
        return learner.adaptable().features(images_BCHW)


def store_features(run: Run, learner: Learner, split: TestSplit, meta: StageMeta) -> StageFeatures:
    """Write the features of the stage that the learner is in, unless they are there already."""
    with suppress(RecordError):
        return load_features(run.folder, meta.stage, meta.sha256)
    found = split.features(learner, meta.stage)
    tensors = {
        "features": found.features_ND,
        "indices": torch.from_numpy(found.indices_N),
        "labels": torch.from_numpy(found.labels_N),
    }
    with written_whole(_path(run.folder, meta.stage)) as partial:
        save_file(tensors, partial, metadata={"checkpoint": meta.sha256})
    return found


def features_stored(run: Path, stage: int) -> bool:
    """Whether the features of that stage are there, of the checkpoint that is there."""
    try:
        with safe_open(_path(run, stage), framework="pt") as file:
            return _checkpoint_of(file) == read_meta(run, stage).sha256
    except (OSError, SafetensorError):
        return False


def load_features(run: Path, stage: int, checkpoint: str) -> StageFeatures:
    """The stored features of one stage, which must be of the checkpoint with that checksum."""
    path = _path(run, stage)
    try:
        with safe_open(path, framework="pt") as file:
            if _checkpoint_of(file) != checkpoint:
                raise ValueError("they were computed from another checkpoint")
            features_ND, indices_N, labels_N = (
                file.get_tensor(name) for name in ("features", "indices", "labels")
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise RecordError(f"cannot use the features {path}: {error}; store them again") from error
    return StageFeatures(stage, features_ND, indices_N.numpy(), labels_N.numpy())


def _checkpoint_of(file: Any) -> str | None:
    return (file.metadata() or {}).get("checkpoint")


def _path(run: Path, stage: int) -> Path:
    return run / "features" / f"{stage:02d}.safetensors"
