"""Each image is asked about once, in batches, and the answer is that of the learner."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from arc_cl.engine.images import Appearance, DeviceImages, Normalisation
from arc_cl.engine.queries import Queries
from arc_cl.engine.runtime import Precision, Runtime

IMAGES, FEATURES = 700, 5
APPEARANCE = Appearance("as_stored", 1, Normalisation((0.0,) * 3, (1.0,) * 3))


class Asked:
    """A learner that notes which images it is asked about; an image tells its number."""

    def __init__(self) -> None:
        self.layer = nn.Linear(3, FEATURES, device="meta").to_empty(device="cpu")
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.batches: list[list[int]] = []

    @property
    def numbers(self) -> list[int]:
        return [number for batch in self.batches for number in batch]

    def query(self, images_BCHW: Tensor) -> Tensor:
        pixels_BC = images_BCHW.flatten(1)
        low_B, high_B, _ = (pixels_BC * 255).round().long().unbind(dim=1)
        self.batches.append((low_B + 256 * high_B).tolist())
        found: Tensor = self.layer(pixels_BC)
        return found

    def loss_given(
        self, images_BCHW: Tensor, queries_BD: Tensor, labels_B: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        raise NotImplementedError

    def features_given(self, images_BCHW: Tensor, queries_BD: Tensor) -> Tensor:
        raise NotImplementedError


def pixels() -> DeviceImages:
    numbers = np.arange(IMAGES)
    whole = np.stack([numbers % 256, numbers // 256, numbers * 7 % 256], axis=1)
    images = whole.astype(np.uint8).reshape(IMAGES, 1, 1, 3)
    return DeviceImages(images, APPEARANCE, torch.device("cpu"))


def queries_of(learner: Asked, precision: Precision = "fp32") -> Queries:
    return Queries(Runtime.open(0, "cpu", precision), learner, pixels())


def test_each_image_is_asked_about_once() -> None:
    learner = Asked()
    queries = queries_of(learner)
    for numbers in ([3, 1, 2], [2, 699, 3], [1, 2, 3], [0], []):
        queries.prepare(torch.tensor(numbers, dtype=torch.int64))
    assert learner.numbers == [1, 2, 3, 699, 0]


def test_it_asks_in_batches_that_fit_a_device() -> None:
    learner = Asked()
    queries_of(learner).prepare(torch.arange(IMAGES))
    assert sorted(learner.numbers) == list(range(IMAGES))
    assert max(map(len, learner.batches)) <= 256


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_answers_are_those_of_the_learner(precision: Precision) -> None:
    learner = Asked()
    queries = queries_of(learner, precision)
    for numbers in (torch.arange(300), torch.arange(200, IMAGES)):
        queries.prepare(numbers)
    asked = torch.tensor([5, 650, 5, 0, 299, 300])
    with torch.no_grad(), Runtime.open(0, "cpu", precision).fabric.autocast():
        expected = learner.query(pixels().at_test(asked))
    found = queries.of(asked)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    torch.testing.assert_close(found, expected.float())
    assert (expected.dtype == torch.bfloat16) == (precision == "bf16")


def test_preparing_more_keeps_what_is_known() -> None:
    learner = Asked()
    queries = queries_of(learner)
    queries.prepare(torch.tensor([4, 2]))
    before = queries.of(torch.tensor([2, 4])).clone()
    queries.prepare(torch.arange(IMAGES))
    assert torch.equal(queries.of(torch.tensor([2, 4])), before)
