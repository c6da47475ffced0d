"""What an evaluation between two tasks does to training, for runs that ask for it by name.

`none` is the only clean choice. `freeze`: the backbone stands still after the first task, and
nothing else happens; that alone explains gains of the published kind. `released`: as in the ARC
release, where ARC's evaluation after each task freezes all but the head for good, and the head that
it adapted on the test stream is what the next task starts from, and what a teacher copies (SLCA,
which goes back to the heads of its tasks, loses it). Such a run is stored, named and reported as
coupled.
"""

from __future__ import annotations

import torch

from arc_cl.contracts import AsksFirst, LabelledImages, Learner, Training
from arc_cl.core.plugin import ARC
from arc_cl.engine.features import TestSplit
from arc_cl.engine.sequence import Between, Run
from arc_cl.errors import CompatibilityError, ConfigurationError
from arc_cl.experiments.spec import Recipe, ReleasedARC


class Uncoupled:
    """Nothing."""

    def freeze(self, stage: int, learner: Learner) -> None: ...

    def adapt(self, stage: int, learner: Learner) -> None: ...


class FreezeAfterFirst:
    """The backbone stands still after the first task."""

    def freeze(self, stage: int, learner: Learner) -> None:
        if stage == 0:
            _freeze_all_but_head(learner)

    def adapt(self, stage: int, learner: Learner) -> None: ...


class AsReleased:
    """ARC's evaluation after each task leaks into the training of the next one."""

    def __init__(
        self, run: Run, test: LabelledImages, arc: ReleasedARC, training_batch: int
    ) -> None:
        self._split = TestSplit(run, test)
        self._run, self._settings = run, arc.settings()
        self._batch_size = arc.batch_size or training_batch
        self._retention, self._shuffled = arc.retention, arc.shuffled

    def freeze(self, stage: int, learner: Learner) -> None:
        """Retention alone touches the flags."""
        if self._retention:
            _freeze_all_but_head(learner)

    def adapt(self, stage: int, learner: Learner) -> None:
        """The head as ARC left it after the test stream of this stage."""
        stream = self._split.features(learner, stage)
        if self._shuffled:
            generator = self._run.runtime.generator("stream", stage)
            stream = stream.rearranged(torch.randperm(len(stream.labels_N), generator=generator))
        head = learner.adaptable().head()
        partition = self._run.scenario.partition(stage)
        arc = ARC(head, tasks=partition, settings=self._settings)
        arc.replay(stream.features_ND.to(head.weight.device), batch_size=self._batch_size)
        with torch.no_grad():
            head.weight.copy_(arc.weight)
            if arc.bias is not None:
                head.bias.copy_(arc.bias)


def between(
    recipe: Recipe, settings: Training, run: Run, learner: Learner, test: LabelledImages
) -> Between:
    """What a recipe asks for; every error before the first batch."""
    coupling = recipe.setup.coupling
    if coupling == "none":
        return Uncoupled()
    if coupling == "freeze":
        return FreezeAfterFirst()
    if recipe.arc is None:
        raise ConfigurationError(
            f"coupling = released needs ARC's values, and the recipe {recipe.name} has none; give "
            f"it a table [arc], or choose --coupling freeze"
        )
    if isinstance(learner, AsksFirst):
        raise CompatibilityError(
            "coupling = released would also adapt the prompts of this learner on the test stream, "
            "which arc-cl does not do; choose --coupling none"
        )
    return AsReleased(run, test, recipe.arc, settings.batch_size)


def _freeze_all_but_head(learner: Learner) -> None:
    free = {id(parameter) for _, parameter in learner.adaptable().parameters("head+prompts")}
    for parameter in learner.modules().parameters():
        if id(parameter) not in free:
            parameter.requires_grad_(False)
