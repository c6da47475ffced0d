"""What an experiment is: typed values that derive from each other. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from arc_cl.core.settings import ARCSettings
from arc_cl.errors import ConfigurationError

Value: TypeAlias = bool | int | float | str | tuple[int, ...]
Origin = Literal["paper", "released", "ours"]
"""Who chose a value: the paper's text, the released code (ARC's or PILOT's), or we did."""
Variant = Literal["sane", "released"]
Coupling = Literal["none", "freeze", "released"]
Transform = Literal["as_stored", "pilot", "coda_cifar", "coda_imagenet_r"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is learnt by whom, whoever it is: the part of a recipe that every learner shares."""

    learner: str
    """Name in the catalogue."""
    data: str
    """Data source, by its name in the catalogue."""
    backbone: str
    """A timm name with its tag, or `glyph_vit`."""
    first_classes: int
    """Classes of the first task."""
    classes_per_task: int
    """Classes of each later task; what remains makes the last one."""
    class_order: int | Literal["natural"] = 1993
    """Seed of the permutation of the classes, or their natural order."""
    variant: Variant = "sane"
    """The learner's form: ours, or as in the released code with its slips."""
    weights: str = "pretrained"
    """`pretrained`, `random`, or a file (safetensors, or a checkpoint that holds plain tensors)."""
    transform: Transform = "pilot"
    """How an image is cropped and resized, in training and at test time."""
    normalise: Literal["weights", "none"] = "weights"
    """Pixels as the weights expect them, or in 0..1 as released."""
    coupling: Coupling = "none"
    """What an evaluation between tasks does to training; `none` is the only clean choice."""
    only_tasks: int = 0
    """Learn this many tasks only; 0 learns all."""
    images_per_class: int = 0
    """Use this many training images a class only; 0 uses all."""

    def __post_init__(self) -> None:
        least = {"first_classes": 1, "classes_per_task": 1, "only_tasks": 0, "images_per_class": 0}
        if self.class_order != "natural":
            least["class_order"] = 0
        for name, smallest in least.items():
            if (value := getattr(self, name)) < smallest:
                raise ConfigurationError(f"{name} is {value}; give {smallest} or more")
        if self.class_order != "natural" and self.class_order >= 2**32:
            raise ConfigurationError(f"class_order is {self.class_order}; give a seed below 2**32")


@dataclass(frozen=True, kw_only=True)
class ReleasedARC:
    """ARC's values in one configuration file of the release."""

    lr: float
    """Of the head."""
    lr_prompt: float | None = None
    """Of the prompts, which the release adapts as well (by Adam); None where there are none."""
    beta: float
    gamma: float
    temperature: float
    label_smoothing: float = 0.0
    """0.1 where the file says `soften_labels`."""
    cross_entropy: bool = True
    entropy: bool = True
    retention: bool = True
    correction: bool = True
    optimizer: Literal["sgd", "adam"] = "sgd"
    batch_size: int | None
    """Images a test-time step; None: as in training (iCaRL's files name none)."""
    shuffled: bool = False
    """The test stream is in random order (L2P), or class by class."""

    def settings(self) -> ARCSettings:
        """All of it as the released code ran it, but for the prompts: ARC adapts the head."""
        return ARCSettings.released(
            lr=self.lr,
            beta=self.beta,
            gamma=self.gamma,
            temperature=self.temperature,
            label_smoothing=self.label_smoothing,
            cross_entropy=self.cross_entropy,
            entropy=self.entropy,
            retention=self.retention,
            correction=self.correction,
            optimizer=self.optimizer,
        )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run, but for its seed: names and values, each with its origin."""

    name: str
    setup: Setup
    settings: Mapping[str, Value]
    """Fields of the learner's own `Settings`; what is not named has its default there."""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """Of the names in `settings` and `setup`; what is not named is ours."""
    arc: ReleasedARC | None = None
    """What the release adapts this learner with on this data; a released coupling needs it."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table: a test-time method, by its name in the catalogue, and its settings.

    `settings` is an instance of the `Settings` of that method; None takes its defaults.
    """

    title: str
    method: str
    settings: object | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Test-time methods side by side on the stages of one run."""

    title: str
    recipe: Recipe
    rows: tuple[Row, ...]
    """The first is what the others are compared with."""
    batch_size: int
    shuffled: bool
    """The test stream: in random order, or class by class."""
    notes: tuple[str, ...] = ()
