"""Weight aligning: the newest rows of the head are as long as the old ones, on average."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from arc_cl import TaskPartition
from arc_cl.adapt import weight_aligning
from arc_cl.errors import CompatibilityError
from lone_head import Head, draw


@pytest.mark.parametrize("bias", [draw(7, seed=1), None], ids=["bias", "no bias"])
@pytest.mark.parametrize("tasks", [[0, 0, 0, 1, 1, 2, 2], [2, 0, 1, 0, 2, 1, 0]], ids=str)
def test_logits_are_those_of_the_aligned_head(tasks: list[int], bias: Tensor | None) -> None:
    weight, features = draw(7, 5), draw(9, 5, seed=2)
    newest = np.array(tasks) == 2
    aligned = weight.numpy().copy()
    norms = np.sqrt((aligned**2).sum(axis=1))
    aligned[newest] *= norms[~newest].mean() / norms[newest].mean()
    assert np.sqrt((aligned**2).sum(axis=1))[newest].mean() == pytest.approx(norms[~newest].mean())
    expected = features.numpy() @ aligned.T + (0 if bias is None else bias.numpy())
    method = weight_aligning.create(weight_aligning.Settings())
    method.start(Head(weight, bias), TaskPartition.of_classes(tasks))
    found = method.predict(features)
    np.testing.assert_allclose(found.logits.numpy(), expected, rtol=0, atol=1e-12)
    assert found.classes.tolist() == expected.argmax(axis=1).tolist()


def test_rows_of_classes_not_seen_yet_count_for_nothing() -> None:
    weight, features = draw(7, 5), draw(9, 5, seed=2)
    longer = torch.cat([weight, 100 * draw(3, 5, seed=3)])
    answers = []
    for rows in (weight, longer):
        method = weight_aligning.create(weight_aligning.Settings())
        method.start(Head(rows), TaskPartition.of_sizes([4, 3]))
        answers.append(method.predict(features).logits)
    torch.testing.assert_close(*answers)


def test_a_newest_task_without_weights_and_a_single_task_stay_as_they_are() -> None:
    weight, features = draw(6, 5), draw(9, 5, seed=2)
    weight[4:] = 0
    for sizes in ([4, 2], [6]):
        method = weight_aligning.create(weight_aligning.Settings())
        method.start(Head(weight), TaskPartition.of_sizes(sizes))
        torch.testing.assert_close(method.predict(features).logits, features @ weight.T)


def test_a_head_with_too_few_rows_is_refused() -> None:
    method = weight_aligning.create(weight_aligning.Settings())
    with pytest.raises(CompatibilityError, match="9 classes, but the head has 7 rows"):
        method.start(Head(draw(7, 5)), TaskPartition.of_sizes([5, 4]))
