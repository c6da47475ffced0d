"""ARC on whole models: any of them gives its own features, and stays as it was."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from arc_cl import ARC, ARCSettings
from arc_cl.errors import CompatibilityError


def timm_vit() -> Any:
    return timm.create_model(
        "vit_tiny_patch16_224", num_classes=20, img_size=32, patch_size=8, depth=2
    )


def timm_resnet() -> Any:
    return timm.create_model("resnet10t", num_classes=20)


def torchvision_resnet() -> Any:
    return torchvision.models.resnet18(num_classes=20)


def torchvision_vit() -> Any:
    return torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=20)


class Own(nn.Module):
    """A model of one's own, whose head has a name of its own."""

    def __init__(self, rows: int = 20) -> None:
        super().__init__()
        self.body = nn.Linear(3 * 32 * 32, 12)
        self.normal = nn.BatchNorm1d(12)
        self.answer = nn.Linear(12, rows)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.answer(self.normal(self.body(images.flatten(1))))
        return out


IMAGES = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
LIVELY = ARCSettings.paper(beta=0.0, lr=0.01, past_only=False)


@pytest.mark.parametrize(
    ("make", "head"),
    [
        (timm_vit, None),
        (timm_resnet, None),
        (torchvision_resnet, None),
        (torchvision_vit, None),
        (Own, "answer"),
    ],
    ids=["timm ViT", "timm ResNet", "torchvision ResNet", "torchvision ViT", "own"],
)
def test_features_are_the_models_own_and_the_model_stays(
    make: Callable[[], nn.Module], head: str | None
) -> None:
    model = make().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wrapped = ARC.wrap(model, tasks=[10, 10], settings=LIVELY, head=head)
    logits = wrapped(IMAGES).logits
    assert wrapped.arc.steps == 1
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    wrapped.reset()
    first = ARC.wrap(model, tasks=[10, 10], head=head, settings=ARCSettings(retention=False))
    with torch.no_grad():
        expected = model.eval()(IMAGES)
    assert torch.allclose(first(IMAGES).logits, expected, atol=1e-5)
    assert not torch.equal(logits, expected)


def test_timm_features_are_those_before_the_head() -> None:
    model: Any = timm_vit().eval()
    wrapped = ARC.wrap(model, tasks=[10, 10])
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(IMAGES), pre_logits=True)
    assert torch.equal(wrapped.features(IMAGES), expected)


def test_only_modules_that_trained_train_again() -> None:
    model = Own().train()
    model.normal.eval()
    ARC.wrap(model, tasks=[10, 10], head="answer")(IMAGES)
    assert model.training
    assert not model.normal.training


def test_state_dict_holds_model_and_adaptation() -> None:
    model = torchvision_resnet()
    wrapped = ARC.wrap(model, tasks=[10, 10], settings=LIVELY)
    wrapped(IMAGES)
    file = io.BytesIO()
    torch.save(wrapped.state_dict(), file)
    file.seek(0)
    other = ARC.wrap(torchvision_resnet(), tasks=[10, 10], settings=LIVELY)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.arc.weight, wrapped.arc.weight)
    assert torch.equal(other(IMAGES).logits, wrapped(IMAGES).logits)


def test_moving_or_halving_the_module_keeps_float32_statistics() -> None:
    wrapped = ARC.wrap(Own(), tasks=[10, 10], head="answer").to(torch.bfloat16)
    assert wrapped.arc.weight.dtype == torch.float32
    assert wrapped(IMAGES.to(torch.bfloat16)).logits.dtype == torch.float32


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Own(), {}, r"No head found in Own .*head=….*'body', 'answer'"),
        (Own(), {"head": "normal"}, "head='normal' is a BatchNorm1d: name the classifying"),
        (Own(), {"head": "anser"}, "head='anser' is not there"),
        (nn.Sequential(nn.Flatten()), {}, "has no named nn.Linear; use ARC"),
        (torch.zeros(3), {}, "takes a torch.nn.Module, not a Tensor"),
        (Own(rows=19), {"head": "answer"}, "tasks add up to 20 classes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_without_a_usable_head(model: Any, options: Any, message: str) -> None:
    was = {k: v.clone() for k, v in model.state_dict().items()} if hasattr(model, "train") else {}
    with pytest.raises(CompatibilityError, match=message):
        ARC.wrap(model, tasks=[10, 10], **options)
    for name, value in was.items():
        assert torch.equal(model.state_dict()[name], value)


def test_a_head_that_sees_tokens_or_is_called_twice_is_refused() -> None:
    class Tokens(nn.Module):
        def __init__(self, calls: int, flat: bool) -> None:
            super().__init__()
            self.fc = nn.Linear(32, 4)
            self.calls, self.flat = calls, flat

        def forward(self, images: Tensor) -> Tensor:
            rows = images[:, 0, 0] if self.flat else images[:, 0]
            for _ in range(self.calls):
                out: Tensor = self.fc(rows)
            return out

    for calls, flat in ((1, False), (2, True)):
        model = Tokens(calls, flat).train()
        wrapped = ARC.wrap(model, tasks=[2, 2])
        with pytest.raises(CompatibilityError, match=r"exactly one input\s+\[B, D\]"):
            wrapped(IMAGES)
        assert model.training
        assert not model.fc._forward_pre_hooks


def test_an_error_inside_the_model_leaves_it_as_it_was() -> None:
    model = Own().train()
    wrapped = ARC.wrap(model, tasks=[10, 10], head="answer")
    with pytest.raises(RuntimeError):
        wrapped(IMAGES[:, :, :5])
    assert all(module.training for module in model.modules())
    assert not model.answer._forward_pre_hooks
