"""ARC against recorded outputs of the released code, and of an independent float64 reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from arc_cl import ARC, ARCSettings, Decision, TaskPartition
from arc_cl.core.correction import task_scores
from arc_cl.core.detection import detect
from arc_cl.core.retention import retention_gradient, retention_loss

Case = dict[str, Any]
Run = Callable[[ARC, Tensor, int], Decision]


def load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


def cases_of(arrays: dict[str, np.ndarray]) -> list[Case]:
    return list(json.loads(str(arrays["cases"])))


def float64(array: np.ndarray) -> Tensor:
    return torch.tensor(array, dtype=torch.float64)


def by_batches(arc: ARC, features: Tensor, batch_size: int) -> Decision:
    parts = [arc(batch) for batch in features.split(batch_size)]
    rows = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in vars(parts[0])
        if name != "_candidates"
    }
    return Decision(**rows, _candidates=parts[0]._candidates)


def by_replay(arc: ARC, features: Tensor, batch_size: int) -> Decision:
    return arc.replay(features, batch_size=batch_size)


def released_settings(case: Case, **changes: Any) -> ARCSettings:
    return ARCSettings.released(
        retention=case["ret"],
        correction=case["cor"],
        cross_entropy=case["ce"],
        entropy=case["em"],
        label_smoothing=0.1 if case["soft"] else 0.0,
        temperature=case["T"],
        gamma=case["gamma"],
        beta=case["beta"],
        **changes,
    )


def bias_of(arc: ARC) -> Tensor:
    assert arc.bias is not None
    return arc.bias


both_ways = pytest.mark.parametrize("run", [by_batches, by_replay])


@both_ways
def test_released_core(golden: Path, run: Run) -> None:
    files = sorted(golden.glob("arc_core_s*.npz"))
    assert files
    for path in files:
        arrays = load(path)
        s, t = int(arrays["s"]), int(arrays["t"])
        features = float64(arrays["features"])
        head = float64(arrays["W0"]), float64(arrays["b0"])
        for j, case in enumerate(cases_of(arrays)):
            arc = ARC(head, tasks=[s] * t, settings=released_settings(case, lr=case["lr"]))
            decision = run(arc, features, case["bs"])
            comparable = arrays["comparable"][j]
            top = decision.top(5).numpy()
            where = f"{path.name} case {j} {case}"
            assert (top[comparable] == arrays["predictions"][j][comparable]).all(), where
            np.testing.assert_allclose(arc.weight, arrays["W_final"][j], atol=1e-7, err_msg=where)
            np.testing.assert_allclose(bias_of(arc), arrays["b_final"][j], atol=1e-7, err_msg=where)


def test_released_core_step_by_step(golden: Path) -> None:
    """Logits before each batch's own step, and the head after it."""
    traced = 0
    for path in sorted(golden.glob("arc_core_s*.npz")):
        arrays = load(path)
        s, t = int(arrays["s"]), int(arrays["t"])
        features = float64(arrays["features"])
        for j, case in enumerate(cases_of(arrays)):
            if f"logits_{j}" not in arrays:
                continue
            settings = released_settings(case, lr=case["lr"])
            arc = ARC(
                (float64(arrays["W0"]), float64(arrays["b0"])), tasks=[s] * t, settings=settings
            )
            nothing = np.empty(0)
            trace_W = arrays.get(f"trace_W_{j}", nothing)
            trace_b = arrays.get(f"trace_b_{j}", nothing)
            for i, batch in enumerate(features.split(case["bs"])):
                logits = arc(batch).logits
                expected = arrays[f"logits_{j}"][i * case["bs"] :][: len(batch)]
                np.testing.assert_allclose(logits, expected, atol=1e-7)
                if i < len(trace_W):
                    np.testing.assert_allclose(arc.weight, trace_W[i], atol=1e-7)
                    np.testing.assert_allclose(bias_of(arc), trace_b[i], atol=1e-7)
                    traced += 1
    assert traced


@both_ways
def test_released_core_in_float32(golden: Path, run: Run) -> None:
    compared = 0
    for path in sorted(golden.glob("arc_core_s*.npz")):
        arrays = load(path)
        s, t = int(arrays["s"]), int(arrays["t"])
        for j, case in enumerate(cases_of(arrays)):
            if f"f32_W_{j}" not in arrays:
                continue
            head = torch.tensor(arrays["W0"]), torch.tensor(arrays["b0"])
            arc = ARC(head, tasks=[s] * t, settings=released_settings(case, lr=case["lr"]))
            run(arc, torch.tensor(arrays["features"]), case["bs"])
            np.testing.assert_allclose(arc.weight, arrays[f"f32_W_{j}"], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(bias_of(arc), arrays[f"f32_b_{j}"], rtol=1e-5, atol=1e-5)
            compared += 1
    assert compared


@both_ways
def test_released_prompt_methods_with_the_head_alone(golden: Path, run: Run) -> None:
    """Adam, weight decay, and a head that already holds the rows of an unseen task."""
    compared = 0
    for path in sorted([*golden.glob("arc_core_l2p*.npz"), *golden.glob("arc_core_dual*.npz")]):
        arrays = load(path)
        s, t = int(arrays["s"]), int(arrays["t"])
        shift = arrays["prompt0"].astype(float)
        if "dualprompt" in path.name:
            shift = shift + arrays["g_prompt0"]
        features = float64(arrays["features"]) + float64(shift)
        for j, case in enumerate(cases_of(arrays)):
            if case["train_prompt"]:
                continue
            settings = released_settings(
                case, optimizer="adam", lr=case["lr_head"], weight_decay=case["wd"]
            )
            head = float64(arrays["W0"]), float64(arrays["b0"])
            arc = ARC(head, tasks=[s] * t, settings=settings)
            decision = run(arc, features, case["bs"])
            where = f"{path.name} case {j} {case}"
            assert (decision.top(5).numpy() == arrays["predictions"][j]).all(), where
            np.testing.assert_allclose(arc.weight, arrays["W_final"][j], atol=1e-7, err_msg=where)
            np.testing.assert_allclose(bias_of(arc), arrays["b_final"][j], atol=1e-7, err_msg=where)
            compared += 1
    assert compared


EDGES_WITHOUT_REFERENCE = {
    "ties_all_equal": "the order of equal classes is arbitrary in the released code",
    "K_below_5": "the released code fails",
    "short_last_task_hard": "the released code scores the wrong groups of classes",
    "short_last_task_soft": "the released code fails",
    "overflow_f32_plus100": "the released code overflows; tested below",
}


@both_ways
def test_edges(golden: Path, run: Run) -> None:
    arrays = load(golden / "arc_edge_seed160.npz")
    for case in cases_of(arrays):
        name = case["name"]
        if name in EDGES_WITHOUT_REFERENCE:
            continue
        arc, decision = edge(arrays, case, run)
        assert (decision.top(5).numpy() == arrays[f"{name}_pred"]).all(), name
        np.testing.assert_allclose(arc.weight, arrays[f"{name}_W_final"], atol=1e-7, err_msg=name)
        last_bias = arrays[f"{name}_b_trace"][-1]
        np.testing.assert_allclose(bias_of(arc), last_bias, atol=1e-7, err_msg=name)


def test_large_logits_get_the_answer_of_shifted_ones(golden: Path) -> None:
    """Where the released code overflows, the answer is that of the same logits less 100."""
    arrays = load(golden / "arc_edge_seed160.npz")
    overflow = next(c for c in cases_of(arrays) if c["name"] == "overflow_f32_plus100")
    _, decision = edge(arrays, overflow, by_replay)
    assert (decision.top(5).numpy() == arrays["no_overflow_pred"]).all()
    assert decision.corrected.any()


def edge(arrays: dict[str, np.ndarray], case: Case, run: Run) -> tuple[ARC, Decision]:
    logits = torch.tensor(arrays[f"{case['name']}_logits"])
    size = logits.shape[1]
    head = torch.eye(size, dtype=logits.dtype), torch.zeros(size, dtype=logits.dtype)
    settings = released_settings(case, lr=case["lr"])
    arc = ARC(head, tasks=[case["s"]] * case["t"], settings=settings)
    return arc, run(arc, logits, case["bs"])


@both_ways
def test_paper_algorithm_1(golden: Path, run: Run) -> None:
    files = sorted(golden.glob("paper_alg1*.npz"))
    assert files
    for path in files:
        arrays = load(path)
        t = arrays["S"].shape[2]
        s = len(arrays["W0"]) // t
        for j, case in enumerate(cases_of(arrays)):
            settings = ARCSettings.paper(
                temperature=case["T"],
                beta=case["beta"],
                gamma=case["gamma"],
                lr=case["lr"],
                momentum=case["mom"],
                cross_entropy=case.get("ce", True),
                entropy=case.get("em", True),
                candidates="task" if case.get("restrict", True) else "cumulative",
            )
            arc = ARC(
                (float64(arrays["W0"]), float64(arrays["b0"])), tasks=[s] * t, settings=settings
            )
            decision = run(arc, float64(arrays["features"]), 1)
            compare_with_algorithm_1(decision, arrays, j, f"{path.name} case {j} {case}")
            np.testing.assert_allclose(arc.weight, arrays["W_final"][j], atol=1e-7)
            np.testing.assert_allclose(bias_of(arc), arrays["b_final"][j], atol=1e-7)


def compare_with_algorithm_1(
    decision: Decision, arrays: dict[str, np.ndarray], j: int, where: str
) -> None:
    branch = arrays["branch"][j]
    assert (decision.retained.numpy() == (branch == 1)).all(), where
    assert (decision.corrected.numpy() == (branch == 2)).all(), where
    assert (decision.classes.numpy() == arrays["y1"][j]).all(), where
    np.testing.assert_allclose(decision.confidence, arrays["c"][j], atol=1e-7, err_msg=where)
    judged = ~decision.ratio.isnan().numpy()
    np.testing.assert_allclose(
        decision.ratio.numpy()[judged], arrays["w"][j][judged], atol=1e-7, err_msg=where
    )


def test_paper_formulas(golden: Path) -> None:
    files = sorted(golden.glob("paper_formulas*.npz"))
    assert files
    for path in files:
        arrays = load(path)
        logits = float64(arrays["logits"])
        partition = TaskPartition.of_sizes([int(arrays["s"])] * int(arrays["t"]))
        for temperature, expected in zip(arrays["T_grid"], arrays["tss"], strict=True):
            scores = task_scores(logits, partition, float(temperature))
            np.testing.assert_allclose(scores, expected, atol=1e-9)
        found = detect(logits, partition)
        c, c_hat, w = arrays["c_chat_w"].T
        np.testing.assert_allclose(found.confidence, c, atol=1e-9)
        np.testing.assert_allclose(found.past_confidence, c_hat, atol=1e-9)
        newest = found.newest.numpy()
        np.testing.assert_allclose(found.ratio.numpy()[newest], w[newest], atol=1e-9)
        assert (found.classes.numpy() == arrays["pred"]).all()
        for name, ce, em in (("ce_em", True, True), ("ce", True, False), ("em", False, True)):
            settings = ARCSettings.paper(cross_entropy=ce, entropy=em)
            loss = retention_loss(logits, found.classes, settings)
            gradient = retention_gradient(logits, found.classes, settings)
            np.testing.assert_allclose(loss, arrays[f"loss_{name}"], atol=1e-9)
            np.testing.assert_allclose(gradient, arrays[f"grad_{name}"], atol=1e-9)
            np.testing.assert_allclose(gradient, arrays[f"grad_fd_{name}"], atol=1e-8)


def test_task_scores_of_paper_and_release(golden: Path) -> None:
    arrays = load(next(iter(sorted(golden.glob("tss_release_vs_paper*.npz")))))
    partition = TaskPartition.of_sizes([int(arrays["s"])] * int(arrays["t"]))
    for i, temperature in enumerate(arrays["T_grid"]):
        scores = task_scores(float64(arrays["logits"]), partition, float(temperature))
        np.testing.assert_allclose(scores, arrays["tss_release"][i], rtol=1e-12)
        np.testing.assert_allclose(scores, arrays["tss_paper"][i], rtol=1e-12)
