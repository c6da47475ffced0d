"""The shipped recipes say what they claim to say."""

from __future__ import annotations

from dataclasses import replace

from arc_cl import ARCSettings, catalogue
from arc_cl.experiments.demo import DEMO
from arc_cl.experiments.hyperparameters import FINETUNE_CIFAR100


def test_the_demo_asks_only_for_what_exists() -> None:
    assert DEMO.learner in catalogue.names("learners")
    for row in DEMO.rows:
        settings = catalogue.load("adapt", row.method).Settings
        assert row.settings is None or isinstance(row.settings, settings)


def test_the_demo_takes_the_paper_with_released_thresholds() -> None:
    arc = DEMO.rows[-1].settings
    assert arc is not None
    released = FINETUNE_CIFAR100
    assert (arc.beta, arc.gamma, arc.temperature) == (0.8, 1.5, 1.1)
    assert (arc.beta, arc.gamma) == (released.beta, released.gamma)
    assert DEMO.batch_size == released.batch_size
    paper = ARCSettings.paper()
    assert replace(arc, gamma=paper.gamma, lr=paper.lr, step=paper.step) == paper


def test_the_rows_of_the_demo_differ_in_one_switch_each() -> None:
    plain, retention, correction, arc = DEMO.rows
    assert plain.method == "none"
    assert arc.settings is not None
    assert retention.settings == replace(arc.settings, correction=False)
    assert correction.settings == replace(arc.settings, retention=False)
