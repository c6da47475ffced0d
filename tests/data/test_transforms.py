"""Views of stored images: Pillow's pixels, torchvision's random boxes, one batch at a time."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import (
    CenterCrop,
    Compose,
    InterpolationMode,
    RandomResizedCrop,
    Resize,
    ToTensor,
)
from torchvision.transforms import functional as torchvision_functional

from arc_cl.data import transforms
from arc_cl.data.transforms import Crops, TransformName, cropped, draw_crops
from arc_cl.errors import CompatibilityError, ConfigurationError
from arc_cl.experiments import spec

FAMILIES: dict[str, TransformName] = {
    "default": "pilot",
    "coda_cifar": "coda_cifar",
    "coda_inr": "coda_imagenet_r",
}
CUTTING: tuple[TransformName, ...] = ("pilot", "coda_cifar", "coda_imagenet_r")


def pictures(height: int, width: int, count: int = 4, seed: int = 0) -> Tensor:
    """Noise, and noise of black and white alone, where a cubic overshoots."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(
        0, 256, (count, height, width, 3), dtype=torch.uint8, generator=generator
    )
    images[count // 2 :] = images[count // 2 :] // 128 * 255
    return images


def pillow(image_HWC: Tensor) -> Image.Image:
    return Image.fromarray(image_HWC.numpy())


def by_torchvision(transform: TransformName, size: int) -> Compose:
    margin = int(256 / 224 * size)
    steps = {
        "pilot": [Resize(margin, InterpolationMode.BICUBIC), CenterCrop(size)],
        "coda_cifar": [Resize(size)],
        "coda_imagenet_r": [Resize(margin), CenterCrop(size)],
    }
    return Compose([*steps[transform], ToTensor()])


def test_the_names_are_those_of_recipes() -> None:
    assert get_args(TransformName) == get_args(spec.Transform)


def test_test_views_are_the_recorded_ones(golden: Path) -> None:
    files = sorted(golden.glob("transforms_seed*.npz"))
    assert files
    for path in files:
        file = np.load(path)
        for kind, images in (("cifar", "images_32"), ("photo", "images_500x375")):
            for family, transform in FAMILIES.items():
                views = transforms.test_view(torch.from_numpy(file[images]), transform)
                for number, view in enumerate(views.numpy()):
                    key = f"{kind}_{number}/{family}"
                    if f"{key}/shape" in file:
                        check_recorded(file, key, view)


def check_recorded(file: np.lib.npyio.NpzFile, key: str, view_CHW: np.ndarray) -> None:
    assert view_CHW.shape == tuple(file[f"{key}/shape"])
    found = {
        "strided": view_CHW[:, 7::14, 7::14],
        "row100": view_CHW[:, 100, :],
        "mean": view_CHW.mean(axis=(1, 2), dtype=np.float64),
        "std": view_CHW.std(axis=(1, 2), dtype=np.float64),
    }
    for name, value in found.items():
        np.testing.assert_allclose(value, file[f"{key}/{name}"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("transform", CUTTING)
@pytest.mark.parametrize(
    ("height", "width", "size"),
    [(32, 32, 224), (75, 100, 64), (160, 120, 64), (48, 48, 48), (56, 57, 49)],
)
def test_a_test_view_is_torchvisions_bit_for_bit(
    transform: TransformName, height: int, width: int, size: int
) -> None:
    images = pictures(height, width)
    reference = by_torchvision(transform, size)
    expected = torch.stack([reference(pillow(image)) for image in images])
    assert torch.equal(transforms.test_view(images, transform, size), expected)


@pytest.mark.parametrize(("height", "width"), [(301, 64), (90, 41)])
def test_tall_images_too_are_resized_columns_first(height: int, width: int) -> None:
    images = pictures(height, width)
    resized = (int(32 * height / width), 32)
    expected = torch.stack(
        [
            ToTensor()(columns_first(pillow(image), resized, Image.Resampling.BICUBIC))
            for image in images
        ]
    )
    top = round((resized[0] - 28) / 2)
    assert torch.equal(
        transforms.test_view(images, "pilot", 28), expected[:, :, top : top + 28, 2:30]
    )


@pytest.mark.parametrize(("height", "width"), [(32, 32), (90, 120), (120, 90), (500, 40)])
def test_a_box_looks_as_pillow_cuts_resizes_and_mirrors_it(height: int, width: int) -> None:
    images = pictures(height, width, count=8)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        crops = draw_crops(len(images), height, width, "pilot", generator)
        views = cropped(images, crops, 64)
        for image, box, flipped, view in zip(
            images, crops.boxes_B4, crops.flipped_B, views, strict=True
        ):
            assert torch.equal(view, by_pillow(image, box, bool(flipped), 64))


def by_pillow(image_HWC: Tensor, box: Tensor, flipped: bool, size: int) -> Tensor:
    top, left, height, width = (int(number) for number in box)
    if height - size > max(2 * (width - size), 0):
        cut = torchvision_functional.crop(pillow(image_HWC), top, left, height, width)
        view = columns_first(cut, (size, size), Image.Resampling.BILINEAR)
    else:
        view = torchvision_functional.resized_crop(
            pillow(image_HWC), top, left, height, width, [size, size], InterpolationMode.BILINEAR
        )
    tensor: Tensor = torchvision_functional.to_tensor(
        torchvision_functional.hflip(view) if flipped else view
    )
    return tensor


def columns_first(
    image: Image.Image, size: tuple[int, int], filter: Image.Resampling
) -> Image.Image:
    """As Pillow up to 12 resizes; 13 begins with the rows where the height shrinks much more."""
    height, width = size
    return image.resize((width, image.height), filter).resize((width, height), filter)


@pytest.mark.parametrize(
    ("transform", "least_area"), [("pilot", 0.05), ("coda_cifar", 0.08), ("coda_imagenet_r", 0.08)]
)
def test_random_boxes_have_the_law_of_torchvisions(
    transform: TransformName, least_area: float
) -> None:
    """Their areas, aspects and places; half of them mirrored."""
    height, width, count = 375, 500, 20_000
    crops = draw_crops(count, height, width, transform, torch.Generator().manual_seed(0))
    top, left, heights, widths = crops.boxes_B4.unbind(dim=1)
    assert torch.equal(crops.boxes_B4, crops.boxes_B4.round())
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + heights <= height).all()
    assert (left + widths <= width).all()
    share = heights * widths / (height * width)
    assert share.min().item() == pytest.approx(least_area, abs=0.005)
    assert share.max().item() > 0.95
    aspect = (widths / heights).log()
    assert aspect.abs().max().item() == pytest.approx(np.log(4 / 3), abs=0.02)
    assert crops.flipped_B.float().mean().item() == pytest.approx(0.5, abs=0.02)
    reach = (top / (height - heights).clamp(min=1))[heights < 200]
    assert reach.mean().item() == pytest.approx(0.5, abs=0.02)
    assert reach.max().item() == 1
    expected = torchvisions_boxes(height, width, least_area, 3_000)
    for found, other in ((heights, expected[:, 2]), (widths, expected[:, 3])):
        error = other.std() / len(other) ** 0.5
        assert abs(found.mean() - other.mean()) < 4 * error


def torchvisions_boxes(height: int, width: int, least_area: float, count: int) -> Tensor:
    image = torch.empty(3, height, width)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        boxes = [
            RandomResizedCrop.get_params(image, [least_area, 1.0], [3 / 4, 4 / 3])
            for _ in range(count)
        ]
    return torch.tensor(boxes, dtype=torch.float64)


@pytest.mark.parametrize(
    ("height", "width", "box"),
    [(10, 400, [0, 193, 10, 13]), (400, 12, [192, 0, 16, 12]), (1, 1, [0, 0, 1, 1])],
)
def test_where_nothing_fits_the_largest_central_box_is_taken(
    height: int, width: int, box: list[int]
) -> None:
    """Ten tries fail almost always in a strip; the few that fit lie inside it all the same."""
    crops = draw_crops(200, height, width, "pilot", torch.Generator().manual_seed(0))
    central = (crops.boxes_B4 == torch.tensor(box)).all(dim=1)
    assert central.float().mean() > 0.2
    top, left, heights, widths = crops.boxes_B4.unbind(dim=1)
    assert ((top + heights <= height) & (left + widths <= width)).all()
    assert ((heights >= 1) & (widths >= 1)).all()


@pytest.mark.parametrize("transform", CUTTING)
def test_a_training_view_obeys_its_generator_alone(transform: TransformName) -> None:
    images, before = pictures(40, 50), torch.get_rng_state()
    views = [
        transforms.train_view(images, transform, 32, torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(torch.get_rng_state(), before)
    assert views[0].shape == (4, 3, 32, 32)
    assert views[0].dtype == torch.float32
    assert views[0].is_contiguous()
    assert 0 <= views[0].min() < views[0].max() <= 1
    assert torch.equal(views[0], views[1])
    assert not torch.equal(views[0], views[2])


def test_mirroring_mirrors() -> None:
    images = pictures(40, 50, count=2)
    boxes = torch.tensor([[3.0, 5, 20, 30]] * 2, dtype=torch.float64)
    plain = cropped(images, Crops(boxes_B4=boxes, flipped_B=torch.tensor([False, False])), 24)
    mixed = cropped(images, Crops(boxes_B4=boxes, flipped_B=torch.tensor([False, True])), 24)
    assert torch.equal(mixed[0], plain[0])
    assert torch.equal(mixed[1], plain[1].flip(-1))


def test_as_stored_neither_cuts_nor_mirrors_nor_draws() -> None:
    images = pictures(32, 32)
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    expected = torch.stack([ToTensor()(pillow(image)) for image in images])
    assert torch.equal(transforms.test_view(images, "as_stored", 224), expected)
    assert torch.equal(transforms.train_view(images, "as_stored", 224, generator), expected)
    assert torch.equal(generator.get_state(), before)


def test_a_view_does_not_depend_on_its_batch() -> None:
    images = pictures(60, 80, count=6)
    together = transforms.test_view(images, "pilot", 64)
    apart = torch.cat([transforms.test_view(image[None], "pilot", 64) for image in images])
    assert torch.equal(together, apart)


def test_images_of_one_channel_have_views_too() -> None:
    images = pictures(32, 32)[..., :1]
    assert transforms.test_view(images, "pilot", 28).shape == (4, 1, 28, 28)


def test_other_images_and_unknown_names_are_refused() -> None:
    with pytest.raises(CompatibilityError, match=r"torch.float32 \(1, 8, 8, 3\).*as they are"):
        transforms.test_view(torch.zeros(1, 8, 8, 3), "pilot")
    with pytest.raises(ConfigurationError, match="'pillot'; did you mean 'pilot'"):
        transforms.test_view(pictures(8, 8), "pillot")  # type: ignore[arg-type]
