"""CoTTA against a numpy model whose gradients are differences of its loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from arc_cl import Decision, TaskPartition
from arc_cl.adapt import cotta
from arc_cl.contracts import Scope
from arc_cl.errors import ConfigurationError

Array = NDArray[np.float64]
Weights = dict[str, Array]
TASKS = TaskPartition.of_sizes([2, 2])
VIEWS = cotta.Settings(lr=0.2, threshold=1.0, views=5, noise=0.5, teacher_decay=0.8, restore=0.0)
"""Views for every batch: without them the student is its teacher, and nothing ever moves."""
SURE = replace(VIEWS, threshold=0.0)
STILL = replace(
    VIEWS,
    flip=False,
    turn=0.0,
    zoom=0.0,
    shift=0.0,
    brightness=0.0,
    contrast=0.0,
    saturation=0.0,
    noise=0.0,
)
"""Views are asked for, and are all the image itself."""


@dataclass
class Model:
    """Four pixels, a hidden layer, four classes."""

    network: nn.ModuleDict

    def features(self, images_BCHW: Tensor) -> Tensor:
        return self.network["body"](images_BCHW)  # type: ignore[no-any-return]

    def classify(self, features_BD: Tensor) -> Tensor:
        return self.network["head"](features_BD)  # type: ignore[no-any-return]

    def head(self) -> nn.Linear:
        head = self.network["head"]
        assert isinstance(head, nn.Linear)
        return head

    def parameters(self, scope: Scope) -> Iterator[tuple[str, nn.Parameter]]:
        part = self.network if scope == "all" else self.network["head"]
        yield from part.named_parameters()


def model(dtype: torch.dtype = torch.float64) -> Model:
    body = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh())
    network = nn.ModuleDict({"body": body, "head": nn.Linear(3, 4)}).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 1, generator=generator)
    return Model(network.eval())


def images(count: int = 12, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(count, 1, 2, 2, generator=generator, dtype=torch.float64).to(dtype)


def values(network: nn.Module) -> Weights:
    return {name: p.detach().numpy().copy() for name, p in network.named_parameters()}


def logits(w: Weights, x: Array) -> Array:
    hidden = np.tanh(x.reshape(len(x), -1) @ w["body.1.weight"].T + w["body.1.bias"])
    return np.asarray(hidden @ w["head.weight"].T + w["head.bias"])


def log_softmax(z: Array) -> Array:
    shifted = z - z.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def loss(w: Weights, x: Array, target: Array) -> float:
    return float(-(np.exp(log_softmax(target)) * log_softmax(logits(w, x))).sum(axis=1).mean())


def slope(w: Weights, name: str, x: Array, target: Array, reach: float = 1e-5) -> Array:
    found = np.zeros_like(w[name])
    for place in np.ndindex(found.shape):
        ends = []
        for side in (reach, -reach):
            moved = {**w, name: w[name].copy()}
            moved[name][place] += side
            ends.append(loss(moved, x, target))
        found[place] = (ends[0] - ends[1]) / (2 * reach)
    return found


class Watched(Model):
    """Remembers what it was shown, and by which head."""

    def __init__(self, network: nn.ModuleDict) -> None:
        super().__init__(network)
        self.shown: list[tuple[Tensor, Tensor]] = []

    def features(self, images_BCHW: Tensor) -> Tensor:
        self.shown.append((images_BCHW, self.head().weight.detach().clone()))
        return super().features(images_BCHW)


@dataclass
class Reference:
    """Student and teacher, taught one batch at a time."""

    how: cotta.Settings
    source: Weights

    def __post_init__(self) -> None:
        self.student, self.teacher = dict(self.source), dict(self.source)
        self.speed = {name: np.zeros_like(value) for name, value in self.source.items()}
        self.draws = torch.Generator().manual_seed(self.how.seed)

    def teach(self, x: Array, views: list[Array]) -> Array:
        """The teacher's mean logits over the views, by which the student then learns."""
        target = np.asarray(sum(logits(self.teacher, view) for view in views) / len(views))
        slopes = {name: slope(self.student, name, x, target) for name in self.source}
        kept = self.how.teacher_decay
        for name, g in slopes.items():
            self.speed[name] = self.how.momentum * self.speed[name] + g
            self.student[name] = self.student[name] - self.how.lr * self.speed[name]
            self.teacher[name] = kept * self.teacher[name] + (1 - kept) * self.student[name]
        return target

    def restore(self) -> None:
        for name, value in self.source.items():
            back = torch.rand(value.shape, generator=self.draws).numpy() < self.how.restore
            self.student[name] = np.where(back, value, self.student[name])


def shown_views(lent: Watched, batch: int) -> list[Array]:
    """What the teacher was shown in the last call: all but the source's and the student's."""
    views = [view for images, _ in lent.shown[1:-1] for view in images.split(batch)]
    lent.shown.clear()
    return [view.numpy() for view in views]


def run(how: cotta.Settings, batches: list[Tensor], lent: Model) -> list[Decision]:
    """All answers; the model is not given back."""
    method = cotta.create(how)
    method.start(lent, TASKS)
    return [method.predict(batch) for batch in batches]


@pytest.mark.parametrize(
    "how",
    [
        VIEWS,
        replace(VIEWS, momentum=0.0, teacher_decay=0.0),
        replace(VIEWS, turn=30.0, contrast=0.5, images_at_once=11),
    ],
    ids=["as set", "the teacher is the student", "other views"],
)
def test_student_and_answers_are_those_of_the_reference(how: cotta.Settings) -> None:
    lent = Watched(model().network)
    reference, method = Reference(how, values(lent.network)), cotta.create(how)
    method.start(lent, TASKS)
    for batch in images().split(5):  # the last one is short
        found = method.predict(batch)
        views = shown_views(lent, len(batch))
        assert len(views) == how.views
        expected = reference.teach(batch.numpy(), views)
        np.testing.assert_allclose(found.logits.numpy(), expected, rtol=0, atol=1e-6)
        assert found.classes.tolist() == expected.argmax(axis=1).tolist()
        for name, value in values(lent.network).items():
            student = reference.student[name]
            np.testing.assert_allclose(value, student, rtol=0, atol=1e-6, err_msg=name)
            assert np.abs(value - reference.source[name]).max() > 1e-3


def test_weights_come_back_as_in_the_reference() -> None:
    # The generator that draws the views goes on to draw the weights: with still views their
    # colours alone are drawn. A teacher whose weights were moved by hand gives a lesson.
    how = replace(STILL, restore=0.3, seed=7, views=2, images_at_once=1)
    lent = Watched(model().network)
    reference, method = Reference(how, values(lent.network)), cotta.create(how)
    method.start(lent, TASKS)
    with torch.no_grad():
        for parameter in lent.network.parameters():
            parameter.add_(0.3)
    reference.student = {name: value + 0.3 for name, value in reference.source.items()}
    for batch in images().split(5):
        method.predict(batch)
        views = shown_views(lent, len(batch))
        for view in views:
            np.testing.assert_array_equal(view, batch.numpy())
            torch.empty(3, len(batch), dtype=batch.dtype).uniform_(generator=reference.draws)
        reference.teach(batch.numpy(), views)
        reference.restore()
        for name, value in values(lent.network).items():
            student = reference.student[name]
            np.testing.assert_allclose(value, student, rtol=0, atol=1e-6, err_msg=name)


def test_the_first_answer_of_a_sure_model_is_its_own() -> None:
    lent = model()
    plain = lent.classify(lent.features(images())).detach()
    assert torch.equal(run(SURE, [images()], lent)[0].logits, plain)


def test_all_weights_come_back_where_restoring_is_certain() -> None:
    lent = model()
    run(replace(VIEWS, restore=1.0), list(images().split(4)), lent)
    for name, value in values(model().network).items():
        np.testing.assert_array_equal(values(lent.network)[name], value)


def test_about_the_asked_share_of_weights_comes_back() -> None:
    body = nn.Sequential(nn.Flatten(), nn.Linear(4, 3000), nn.Tanh())
    lent = Model(nn.ModuleDict({"body": body, "head": nn.Linear(3000, 4)}).double())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in lent.network.parameters():
            parameter.normal_(0, 0.02, generator=generator)
    before = values(lent.network)
    run(replace(VIEWS, restore=0.25), [images()], lent)
    student, plain = values(lent.network)["head.weight"], before["head.weight"]
    same = float((student == plain).mean())
    assert 0.23 < same < 0.27


def test_views_are_made_only_below_the_threshold() -> None:
    plain = model().classify(model().features(images())).detach()
    assert not torch.equal(run(VIEWS, [images()], model())[0].logits, plain)
    p = plain.softmax(dim=1).amax(dim=1).mean().item()
    for threshold, by_views in ((p - 1e-6, False), (p + 1e-6, True)):
        found = run(replace(VIEWS, threshold=threshold), [images()], model())[0]
        assert torch.equal(found.logits, plain) is not by_views


def test_the_source_decides_on_views_not_the_student() -> None:
    lent = Watched(model().network)
    run(replace(VIEWS, views=6, images_at_once=8), [images(4)] * 2, lent)
    seen = [(len(images), head) for images, head in lent.shown]
    sizes = [size for size, _ in seen]
    assert sizes == [4, 8, 8, 8, 4] * 2  # source, six views two by two, student
    source, teacher, student = seen[5][1], seen[6][1], seen[9][1]
    assert torch.equal(source, seen[0][1])
    assert not torch.equal(teacher, source)
    assert (student - source).norm() > (teacher - source).norm()


def test_the_answer_does_not_depend_on_how_views_share_a_pass() -> None:
    how = replace(STILL, views=7)
    found = [
        run(replace(how, images_at_once=many), [images(3)] * 2, model()) for many in (1, 6, 99)
    ]
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one.logits, other.logits)


def test_everything_is_given_back() -> None:
    lent = model()
    lent.head().weight.requires_grad_(False)
    kept = torch.ones_like(lent.head().bias)
    lent.head().bias.grad = kept
    before = values(lent.network)
    places = [p.data_ptr() for p in lent.network.parameters()]
    method = cotta.create(replace(VIEWS, restore=0.1))
    method.start(lent, TASKS)
    for batch in images().split(4):
        method.predict(batch)
    method.finish()
    flags = {name: p.requires_grad for name, p in lent.network.named_parameters()}
    assert [name for name, learns in flags.items() if not learns] == ["head.weight"]
    assert lent.head().bias.grad is kept
    assert [p.data_ptr() for p in lent.network.parameters()] == places
    for name, value in values(lent.network).items():
        np.testing.assert_array_equal(value, before[name])


def test_weights_are_in_place_again_after_an_error() -> None:
    class Breaks(Model):
        def features(self, images_BCHW: Tensor) -> Tensor:
            raise KeyError("on purpose")

    lent = Breaks(model().network)
    places = [p.data_ptr() for p in lent.network.parameters()]
    method = cotta.create(SURE)
    method.start(lent, TASKS)
    with pytest.raises(KeyError):
        method.predict(images())
    assert [p.data_ptr() for p in lent.network.parameters()] == places


def test_it_learns_whatever_mode_the_caller_is_in() -> None:
    how = replace(VIEWS, restore=0.1)
    found = []
    for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        method, lent = cotta.create(how), model()
        with mode:
            method.start(lent, TASKS)
            batches = [batch + 0 for batch in images().split(4)]
            found.append([method.predict(batch).logits.clone() for batch in batches])
            method.finish()
        for name, value in values(lent.network).items():
            np.testing.assert_array_equal(value, values(model().network)[name])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_autocast_never_answers_with_the_weights_of_before() -> None:
    how = replace(VIEWS, lr=0.5, teacher_decay=0.5)
    batches = [batch.float() for batch in images().split(4)]

    def answers(cache: bool) -> list[Tensor]:
        method = cotta.create(how)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            method.start(model(torch.float32), TASKS)
            return [method.predict(batch).logits for batch in batches]

    # Autocast keeps its copies of weights until the context ends, whatever becomes of these.
    inside, apart = answers(cache=True), answers(cache=False)
    assert all(torch.equal(a, b) for a, b in zip(inside, apart, strict=True))
    assert all(each.dtype == torch.float32 for each in inside)


def test_a_row_that_is_not_finite_teaches_nothing() -> None:
    spoilt = torch.cat([images(4), torch.full((1, 1, 2, 2), torch.inf, dtype=torch.float64)])
    lent = Watched(model().network)
    reference, method = Reference(VIEWS, values(lent.network)), cotta.create(VIEWS)
    method.start(lent, TASKS)
    found = method.predict(spoilt)
    assert found.confidence.isnan().tolist() == [False] * 4 + [True]
    assert bool(found.logits.isfinite().all())
    reference.teach(images(4).numpy(), [view[:4] for view in shown_views(lent, 5)])
    method.predict(spoilt[4:])  # nothing to learn from at all
    for name, value in values(lent.network).items():
        np.testing.assert_allclose(value, reference.student[name], rtol=0, atol=1e-6)


def grid(channels: int = 3) -> Tensor:
    """Images whose pixels all differ: [6,C,8,8]."""
    generator = torch.Generator().manual_seed(8)
    return torch.randn(6, channels, 8, 8, generator=generator, dtype=torch.float64)


class Eye(Model):
    """Its features are the pixels; its teacher's answers show the views."""

    def features(self, images_BCHW: Tensor) -> Tensor:
        return images_BCHW.flatten(1) * self.network["body"].weight  # type: ignore[operator]

    def classify(self, features_BD: Tensor) -> Tensor:
        return features_BD + 0 * self.head().bias[0]


def view(how: cotta.Settings, batch: Tensor) -> Tensor:
    """One random view of each image, as the model gets to see it."""
    body = nn.Module()
    body.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
    lent = Eye(nn.ModuleDict({"body": body, "head": nn.Linear(1, 1, dtype=torch.float64)}))
    method = cotta.create(replace(how, views=1))
    method.start(lent, TaskPartition.of_sizes([batch[0].numel()]))
    return method.predict(batch).logits.view_as(batch)


def test_a_flipped_view_is_the_image_or_its_mirror() -> None:
    batch = grid()
    found = view(replace(STILL, flip=True, seed=2), batch)
    kept = [torch.allclose(a, b) for a, b in zip(found, batch, strict=True)]
    mirrored = [torch.allclose(a, b.flip(2)) for a, b in zip(found, batch, strict=True)]
    assert [a != b for a, b in zip(kept, mirrored, strict=True)] == [True] * 6
    assert 0 < sum(kept) < 6


def test_a_shifted_view_is_the_image_elsewhere() -> None:
    ramp = torch.arange(8.0, dtype=torch.float64).expand(5, 1, 8, 8).clone()
    moved = view(replace(STILL, shift=0.25), ramp) - ramp
    inner = moved[:, 0, 2:6, 3:5]
    assert (inner - inner[:, :1, :1]).abs().max() < 1e-9  # every pixel by as much
    assert 0.1 < inner.abs().max() <= 2  # a quarter of eight pixels
    assert len(inner[:, 0, 0].unique()) == 5  # each image by its own draw


def test_a_turned_view_keeps_what_is_round() -> None:
    place = torch.linspace(-1, 1, 33, dtype=torch.float64)
    hill = torch.exp(-6 * (place[:, None] ** 2 + place**2)).expand(4, 1, 33, 33).clone()
    torch.testing.assert_close(view(replace(STILL, turn=40.0), hill), hill, rtol=0, atol=0.02)
    slope_ = place.expand(4, 1, 33, 33).clone()
    assert (view(replace(STILL, turn=40.0), slope_) - slope_).abs().max() > 0.05


def test_turning_does_not_shear_an_oblong_image() -> None:
    down, right = torch.linspace(-1, 1, 33), torch.linspace(-2, 2, 65)
    hill = torch.exp(-6 * (down[:, None] ** 2 + right**2)).double().expand(4, 1, 33, 65).clone()
    torch.testing.assert_close(view(replace(STILL, turn=40.0), hill), hill, rtol=0, atol=0.02)


def test_a_zoomed_view_keeps_the_centre() -> None:
    ramp = torch.linspace(-1, 1, 9, dtype=torch.float64).expand(4, 1, 9, 9).clone()
    found = view(replace(STILL, zoom=0.3), ramp)
    torch.testing.assert_close(found[:, :, 4, 4], ramp[:, :, 4, 4])
    scale = found[:, 0, 4, 5] / ramp[:, 0, 4, 5]
    assert (scale > 0.69).all()
    assert (scale < 1.31).all()
    assert len(scale.unique()) == 4


def test_colours_move_each_in_its_own_way() -> None:
    batch, axes = grid(), (1, 2, 3)
    lighter = view(replace(STILL, brightness=0.5), batch) - batch
    assert (lighter.amax(axes) - lighter.amin(axes)).abs().max() < 1e-9
    assert (lighter.amax(axes).abs() <= 0.5 * batch.std(axes)).all()
    contrast = view(replace(STILL, contrast=0.5), batch)
    torch.testing.assert_close(contrast.mean(axes), batch.mean(axes))
    share = contrast.std(axes) / batch.std(axes)
    assert (share > 0.49).all()
    assert (share < 1.51).all()
    colour = view(replace(STILL, saturation=0.5), batch)
    torch.testing.assert_close(colour.mean(1), batch.mean(1))
    assert not torch.allclose(colour, batch)
    grey = grid(channels=1)
    torch.testing.assert_close(view(replace(STILL, saturation=0.5), grey), grey)
    noise = view(replace(STILL, noise=0.1), batch) - batch
    assert noise.std().item() == pytest.approx(0.1, rel=0.15)


def test_views_follow_the_seed() -> None:
    one, same, other = (view(replace(VIEWS, seed=seed), grid()) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1.0),
        ("optimizer", "lion"),
        ("momentum", 1.0),
        ("teacher_decay", 1.5),
        ("threshold", -0.1),
        ("views", 0),
        ("restore", 2.0),
        ("images_at_once", 0),
        ("turn", -1.0),
        ("zoom", 1.0),
        ("noise", float("inf")),
        ("seed", -1),
    ],
)
def test_wrong_settings_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=name):
        cotta.Settings(**{name: value})  # type: ignore[arg-type]
