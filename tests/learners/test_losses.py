"""Losses that several learners share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from arc_cl.learners._losses import auxiliary_targets, distillation, local_cross_entropy


def test_distillation_as_released(golden: Path) -> None:
    files = sorted(golden.glob("kd_loss_seed*.npz"))
    assert files
    for path in files:
        data = np.load(path)
        for case in range(sum(name.startswith("student_") for name in data.files)):
            student = torch.from_numpy(data[f"student_{case}"]).double().requires_grad_()
            teacher = torch.from_numpy(data[f"teacher_{case}"]).double()
            loss = distillation(student, teacher, float(data[f"T_{case}"]))
            loss.backward()
            assert loss.item() == pytest.approx(float(data[f"loss_{case}"]), abs=1e-9)
            gradient = torch.from_numpy(data[f"grad_{case}"]).double()
            torch.testing.assert_close(student.grad, gradient, rtol=0, atol=1e-9)


def test_distillation_asks_for_the_teachers_classes_alone() -> None:
    student = torch.tensor([[1.0, 3.0, 9.0]], requires_grad=True)
    loss = distillation(student, torch.tensor([[1.0, 3.0]]), temperature=2.0)
    share = torch.tensor([0.5, 1.5]).softmax(dim=0)
    assert loss.item() == pytest.approx(-(share * share.log()).sum().item())
    loss.backward()
    assert student.grad is not None
    assert student.grad.abs().max() < 1e-7  # the student agrees, and new classes do not count


def test_local_cross_entropy_leaves_earlier_classes_out() -> None:
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.tensor([3, 4, 3, 4])
    loss = local_cross_entropy(logits, labels, 3)
    assert loss.item() == pytest.approx(cross_entropy(logits[:, 3:], labels - 3).item())
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[:, :3].abs().max() == 0


def test_an_auxiliary_head_tells_old_from_each_new_class() -> None:
    assert auxiliary_targets(torch.arange(6), 4).tolist() == [0, 0, 0, 0, 1, 2]
