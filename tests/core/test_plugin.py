"""The plug-in by its public surface: what it answers, keeps, guards against and refuses."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import arc_cl
from arc_cl import ARC, ARCSettings, Decision, TaskPartition
from arc_cl.errors import ARCError, ARCWarning, CompatibilityError, ConfigurationError

WIDTH = 16


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def linear(rows: int = 30, *, bias: bool = True) -> nn.Linear:
    head = nn.Linear(WIDTH, rows, bias=bias)
    with torch.no_grad():
        head.weight.copy_(seeded(rows, WIDTH))
        if bias:
            head.bias.copy_(0.3 * seeded(rows, seed=1))
    return head


def lively(**changes: Any) -> ARCSettings:
    """Settings under which much happens."""
    return ARCSettings.paper(**{"beta": 0.2, "lr": 0.01, "gamma": 1.2, **changes})


class TestAnswers:
    def test_five_lines(self) -> None:
        arc = ARC(linear(), tasks=[10] * 3, settings=lively())
        decision = arc(seeded(40, WIDTH))
        assert decision.classes.dtype == decision.tasks.dtype == torch.int64
        assert decision.logits.shape == (40, 30)
        assert decision.confidence.shape == decision.ratio.shape == (40,)
        assert decision.retained.dtype == decision.corrected.dtype == torch.bool
        assert torch.equal(decision.tasks, decision.classes // 10)
        assert decision.retained.any()
        assert decision.corrected.any()
        assert not (decision.retained & decision.corrected).any()
        assert arc.steps == 1

    def test_the_ratio_is_nan_outside_the_newest_task(self) -> None:
        arc = ARC(linear(), tasks=[10] * 3, settings=lively(retention=False, correction=False))
        decision = arc(seeded(40, WIDTH))
        assert torch.equal(decision.ratio.isnan(), decision.tasks != 2)

    def test_a_corrected_row_takes_a_class_of_the_chosen_task(self) -> None:
        arc = ARC(linear(), tasks=[10] * 3, settings=lively(retention=False))
        decision = arc(seeded(200, WIDTH))
        top = decision.top(30)
        assert torch.equal(top[:, 0], decision.classes)
        assert ((top[decision.corrected] >= 0).sum(1) == 10).all()
        assert (top[~decision.corrected] >= 0).all()

    def test_top_is_sorted_and_padded(self) -> None:
        decision = ARC(linear(4), tasks=[2, 2])(seeded(5, WIDTH))
        top = decision.top(6)
        assert top.shape == (5, 6)
        assert (top[:, 4:] == -1).all()
        assert torch.equal(top[:, :1], decision.top(1))
        with pytest.raises(ConfigurationError, match="k must be at least 1"):
            decision.top(0)

    def test_decisions_are_frozen(self) -> None:
        decision = ARC(linear(), tasks=[10] * 3)(seeded(2, WIDTH))
        with pytest.raises(AttributeError):
            decision.classes = torch.zeros(2)  # type: ignore[misc]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_features_of_any_float_dtype(self, dtype: torch.dtype) -> None:
        features = seeded(20, WIDTH).to(dtype)
        decision = ARC(linear(), tasks=[10] * 3, settings=lively())(features)
        assert decision.logits.dtype == decision.confidence.dtype == torch.float32
        exact = ARC(linear().double(), tasks=[10] * 3, settings=lively())(features)
        assert exact.logits.dtype == torch.float64
        assert torch.equal(decision.classes, exact.classes)

    def test_a_half_precision_head_is_kept_in_float32(self) -> None:
        arc = ARC(linear().half(), tasks=[10] * 3)
        assert arc.weight.dtype == torch.float32

    def test_under_autocast_and_inference_mode(self) -> None:
        features = seeded(50, WIDTH)
        plain, cast = (ARC(linear(), tasks=[10] * 3, settings=lively()) for _ in range(2))
        expected = plain.replay(features)
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            found = cast.replay(features)
        assert torch.equal(found.logits, expected.logits)

    def test_an_empty_batch_gets_an_empty_answer(self) -> None:
        arc = ARC(linear(), tasks=[10] * 3)
        for decision in (arc(torch.zeros(0, WIDTH)), arc.replay(torch.zeros(0, WIDTH))):
            assert len(decision) == 0
            assert decision.logits.shape == (0, 30)
            assert decision.top(3).shape == (0, 3)
        assert arc.steps == 0

    def test_a_head_without_bias(self) -> None:
        arc = ARC(linear(bias=False), tasks=[10] * 3, settings=lively())
        assert arc(seeded(20, WIDTH)).logits.shape == (20, 30)
        assert arc.bias is None

    def test_unseen_classes_get_no_logit_and_no_gradient(self) -> None:
        head = linear(40)
        arc = ARC(head, tasks=[10] * 3, settings=lively())
        assert arc.replay(seeded(100, WIDTH)).logits.shape == (100, 30)
        assert arc.steps > 0
        assert torch.equal(arc.weight[30:], head.weight[30:])

    @pytest.mark.parametrize("preset", [ARCSettings.paper, ARCSettings.released])
    def test_one_class(self, preset: Any) -> None:
        arc = ARC(linear(1), tasks=[1], settings=preset())
        decision = arc.replay(seeded(5, WIDTH))
        assert decision.classes.tolist() == [0] * 5
        assert (decision.confidence == 1).all()
        assert torch.equal(arc.weight, linear(1).weight)


class TestTheHead:
    def test_the_head_that_was_passed_is_never_modified(self) -> None:
        head = linear()
        before = {name: value.clone() for name, value in head.state_dict().items()}
        arc = ARC(head, tasks=[10] * 3, settings=lively())
        arc.replay(seeded(100, WIDTH))
        assert arc.steps > 0
        for name, value in head.state_dict().items():
            assert torch.equal(value, before[name])
        assert head.weight.grad is None
        assert head.weight.requires_grad

    def test_what_it_hands_out_are_copies(self) -> None:
        arc = ARC(linear(), tasks=[10] * 3)
        arc.weight.zero_()
        bias = arc.bias
        assert bias is not None
        bias.fill_(9)
        arc.state_dict()["weight"].zero_()
        assert torch.equal(arc.weight, linear().weight)

    def test_reset_goes_back_to_the_head_as_given(self) -> None:
        arc = ARC(linear(), tasks=[10] * 3, settings=lively())
        first = arc.replay(seeded(100, WIDTH))
        arc.reset()
        assert torch.equal(arc.weight, linear().weight)
        assert arc.steps == 0
        assert torch.equal(arc.replay(seeded(100, WIDTH)).logits, first.logits)


class TestState:
    @pytest.mark.parametrize("changes", [{}, {"optimizer": "adam"}, {"step": "relative"}], ids=str)
    def test_a_restart_continues_bit_by_bit(self, changes: dict[str, Any]) -> None:
        features = seeded(300, WIDTH)
        whole = ARC(linear(), tasks=[10] * 3, settings=lively(**changes))
        whole.replay(features[:150])
        file = io.BytesIO()
        torch.save(whole.state_dict(), file)
        file.seek(0)
        resumed = ARC(linear(), tasks=[10] * 3, settings=lively(**changes))
        resumed.load_state_dict(torch.load(file, weights_only=True))
        for stretch in (features[150:200], features[200:]):
            a, b = whole.replay(stretch), resumed.replay(stretch)
            assert torch.equal(a.logits, b.logits)
        assert torch.equal(whole.weight, resumed.weight)
        assert whole.steps == resumed.steps
        resumed.reset()
        assert torch.equal(resumed.weight, linear().weight)

    def test_the_state_of_another_head_is_refused(self) -> None:
        arc = ARC(linear(), tasks=[10] * 3)
        with pytest.raises(CompatibilityError, match=r"weight in the state is \[40, 16\]"):
            arc.load_state_dict(ARC(linear(40), tasks=[10] * 3).state_dict())
        with pytest.raises(CompatibilityError, match="missing"):
            arc.load_state_dict({})
        with pytest.raises(CompatibilityError, match="bias"):
            arc.load_state_dict(ARC(linear(bias=False), tasks=[10] * 3).state_dict())
        with pytest.raises(CompatibilityError, match="other tasks"):
            arc.load_state_dict(ARC(linear(), tasks=[20, 10]).state_dict())
        assert torch.equal(arc.weight, linear().weight)


class TestGuards:
    def test_max_drift_undoes_what_goes_beyond_it(self) -> None:
        settings = lively(lr=1.0, max_drift=0.05, beta=0.0)
        arc = ARC(linear(), tasks=[10] * 3, settings=settings)
        drifts = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in seeded(100, WIDTH).split(1):
                arc(batch)
                drifts.append(arc.drift)
        assert 0 < max(drifts) <= 0.05
        assert arc.undone_steps > 0
        assert [w.category for w in caught] == [ARCWarning]  # once
        assert "max_drift=0.05" in str(caught[0].message)

    @pytest.mark.parametrize(
        ("changes", "warns"),
        [
            ({"lr": 1e-4}, True),
            ({"lr": 1e-6}, False),
            ({"lr": 1e-3, "step": "relative"}, False),
            ({"lr": 1.0, "step": "relative"}, True),
            ({"lr": 1e-2, "optimizer": "adam"}, True),
            ({"lr": 1e-6, "optimizer": "adam"}, False),
        ],
        ids=str,
    )
    def test_a_step_far_too_large_for_the_features_warns(
        self, changes: dict[str, Any], warns: bool
    ) -> None:
        """pilot: with features of squared norm 10³ a rate of 1e-4 ruins a head, 1e-6 does not."""
        features = seeded(60, WIDTH) * (1e3 / WIDTH) ** 0.5
        arc = ARC(linear(), tasks=[10] * 3, settings=ARCSettings(beta=0.0, **changes))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            arc.replay(features)
            arc.replay(features)
        messages = [str(w.message) for w in caught if "far too large" in str(w.message)]
        assert len(messages) == warns  # once, not at each call
        if warns:
            assert "step='relative'" in messages[0]

    def test_presets_do_not_warn_of_the_step(self) -> None:
        arc = ARC(linear(), tasks=[10] * 3, settings=ARCSettings.paper(lr=0.1, beta=0.0))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            arc.replay(seeded(50, WIDTH))

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_a_row_that_is_not_finite_is_answered_and_never_learnt_from(self, bad: float) -> None:
        features = seeded(41, WIDTH)
        features[20, 5] = bad
        kept = torch.arange(41) != 20
        arc, clean = (
            ARC(linear(), tasks=[10] * 3, settings=lively(step="relative", lr=0.1))
            for _ in range(2)
        )
        with pytest.warns(ARCWarning, match=r"1 row\(s\)") as caught:
            first, second = arc(features), arc(features)
        assert len(caught) == 1  # the second time it is known
        assert arc.nonfinite_rows == 2
        expected = clean(features[kept])
        clean(features[kept])
        assert torch.equal(arc.weight, clean.weight)
        assert torch.equal(first.classes[kept], expected.classes)
        for decision in (first, second):
            assert decision.logits.isfinite().all()
            assert decision.confidence[20].isnan()
            assert decision.ratio[20].isnan()
            assert not decision.retained[20]
            assert not decision.corrected[20]

    def test_features_that_overflow_float32_count_as_not_finite(self) -> None:
        features = seeded(3, WIDTH).double()
        features[1, 0] = 1e60
        arc = ARC(linear(), tasks=[10] * 3)
        with pytest.warns(ARCWarning):
            assert arc(features).logits.isfinite().all()
        assert arc.nonfinite_rows == 1


class TestRefusals:
    @pytest.mark.parametrize(
        ("head", "tasks", "message"),
        [
            (linear(29), [10] * 3, "tasks add up to 30 classes .* head has 29 rows"),
            (nn.Conv2d(3, 4, 1), [2, 2], "head is a Conv2d: expected a torch.nn.Linear"),
            ((seeded(3, 4, 5), None), [3], r"a tuple \(torch.float32 \[3, 4, 5\], NoneType\)"),
            ((torch.ones(3, 4, dtype=torch.int64), None), [3], "floating-point"),
            ((seeded(3, 4), seeded(4)), [3], r"bias has shape \[4\].*expected a bias of shape"),
            ((seeded(3, 4), [1, 2, 3]), [3], "expected a torch.nn.Linear, or a tuple"),
            ((torch.full((3, 4), torch.nan), None), [3], "NaN or infinite weights"),
            ((seeded(3, 4), torch.tensor([0, torch.inf, 0])), [3], "NaN or infinite"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_heads_that_do_not_fit(self, head: Any, tasks: list[int], message: str) -> None:
        with pytest.raises(CompatibilityError, match=message):
            ARC(head, tasks=tasks)

    def test_settings_of_the_wrong_kind(self) -> None:
        with pytest.raises(ConfigurationError, match="expected an ARCSettings"):
            ARC(linear(), tasks=[10] * 3, settings={"beta": 0.8})  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("features", "message"),
        [
            (torch.zeros(2, WIDTH, dtype=torch.int64), "dtype torch.int64"),
            (torch.zeros(2, WIDTH, dtype=torch.complex64), "dtype torch.complex64"),
            (torch.zeros(2, WIDTH + 1), r"shape \[2, 17\]: the head takes \[B, 16\]"),
            (torch.zeros(WIDTH), r"shape \[16\]"),
            (torch.zeros(2, 3, WIDTH), r"shape \[2, 3, 16\]"),
            ([[0.0] * WIDTH], "a list: expected a torch.Tensor"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_features_that_do_not_fit(self, features: Any, message: str) -> None:
        arc = ARC(linear(), tasks=[10] * 3)
        for use in (arc, arc.replay):
            with pytest.raises(CompatibilityError, match=message):
                use(features)
        assert torch.equal(arc.weight, linear().weight)

    @pytest.mark.parametrize("batch_size", [0, -1, 1.5, True, "1"])
    def test_batch_sizes(self, batch_size: Any) -> None:
        with pytest.raises(ConfigurationError, match="batch_size="):
            ARC(linear(), tasks=[10] * 3).replay(seeded(3, WIDTH), batch_size=batch_size)

    def test_all_are_of_one_family_and_value_errors(self) -> None:
        for error in (ConfigurationError, CompatibilityError):
            assert issubclass(error, ARCError)
            assert issubclass(error, ValueError)


class TestThePackage:
    def test_public_names(self) -> None:
        assert sorted(arc_cl.__all__) == ["ARC", "ARCSettings", "Decision", "TaskPartition"]
        assert (arc_cl.ARC, arc_cl.Decision) == (ARC, Decision)
        assert arc_cl.TaskPartition is TaskPartition
        assert set(arc_cl.__all__) <= set(dir(arc_cl))
        with pytest.raises(AttributeError, match="no attribute 'Arc'"):
            arc_cl.Arc  # noqa: B018

    def test_calls_need_no_compiler(self) -> None:
        code = (
            "import sys, torch; from arc_cl import ARC; ARC(torch.nn.Linear(2, 2), tasks=[1, 1])"
            "(torch.ones(1, 2)); sys.exit('numba' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
