"""Recorded trainings of the released code, repeated by our learners step by step.

`stub`: three tasks on a backbone of one layer. `e2e`: three tasks on a small vision transformer,
with exemplars, answers and, in the coupled cases, what ARC's evaluation does to the training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from arc_cl import ARC, ARCSettings, Decision
from arc_cl.contracts import Learner, TaskInfo
from arc_cl.learners import der, finetune, icarl, memo

Batch = tuple[Tensor, Tensor]
Numbers = dict[str, Tensor]
After = Callable[[int, Learner, Tensor], Tensor]
TASKS = tuple(
    TaskInfo(index=stage, seen_classes=5 * stage + 5, new_classes=5, tasks=3, classes=15)
    for stage in range(3)
)
STAGES = pytest.mark.parametrize("name", ["finetune", "icarl", "der", "memo"])


def train(learner: Learner, task: TaskInfo, batches: list[Batch]) -> list[Numbers]:
    """Plain SGD by the learner's own plan; the batches of all epochs, one after the other."""
    plan = learner.plan(task)
    assert plan.optimizer == "sgd"
    optimizer = torch.optim.SGD(
        [
            {"params": group.parameters, "lr": group.lr, "weight_decay": group.weight_decay}
            for group in plan.groups
        ],
        momentum=plan.momentum,
    )
    learner.modules().train()
    logged = []
    for step, (images, labels) in enumerate(batches):
        for group, planned in zip(optimizer.param_groups, plan.groups, strict=True):
            group["lr"] = planned.lr * plan.schedule[step * plan.epochs // len(batches)]
        loss, numbers = learner.loss(images, labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        logged.append(dict(numbers))
    learner.modules().eval()
    return logged


@torch.no_grad()
def logits_of(learner: Learner, images: Tensor) -> Tensor:
    adaptable = learner.adaptable()
    return adaptable.classify(adaptable.features(images))


def use(learner: Any, args: dict[str, Any], *, first: bool) -> None:
    """The release has a rate and a decay of its own for the first task; ours are the same."""
    learner.settings = replace(
        learner.settings,
        lr=args["init_lr" if first else "lrate"],
        lr_decay=args["init_lr_decay" if first else "lrate_decay"],
    )


def settings_of(module: ModuleType, args: dict[str, Any], **changes: Any) -> Any:
    return module.Settings(
        lr=args["init_lr"],
        epochs_first=args["init_epoch"],
        epochs=args["epochs"],
        batch_size=args["batch_size"],
        milestones_first=tuple(args["init_milestones"]),
        milestones=tuple(args["milestones"]),
        weight_decay_first=args["init_weight_decay"],
        weight_decay=args["weight_decay"],
        **changes,
    )


def close(found: Tensor, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(
        found.double(), torch.as_tensor(expected).double(), rtol=0, atol=tolerance
    )


# --- stub ------------------------------------------------------------------------------------


class Layer(nn.Module):
    """One linear layer and tanh."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.num_features = outputs
        self.lin = nn.Linear(inputs, outputs, dtype=torch.float64)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.lin(rows))


def stub(name: str, args: dict[str, Any]) -> Learner:
    if name == "finetune":
        return finetune.create(Layer(6, 8), settings_of(finetune, args))
    if name == "icarl":
        temperature = float(args["T"])
        settings = settings_of(icarl, args, memory=0, temperature=temperature)
        return icarl.create(Layer(6, 8), settings)
    if name == "der":
        return der.create(Layer(6, 8), settings_of(der, args, memory=0))
    settings = settings_of(memo, args, memory=0, alpha_aux=args["alpha_aux"])
    return memo.MEMO(Layer(6, 7), Layer(7, 8), settings)


def recorded(data: Any, prefix: str) -> dict[str, Tensor]:
    """A recorded state under our names."""
    ours = {"fc": "head", "aux_fc": "auxiliary", "TaskAgnosticExtractor": "backbone.trunk"}
    ours |= {"backbones": "backbone.branches", "AdaptiveExtractors": "backbone.branches"}
    state = {}
    for name in data.files:
        if name.startswith(prefix):
            first, _, rest = name.removeprefix(prefix).partition(".")
            state[f"{ours.get(first, first)}.{rest}"] = torch.from_numpy(data[name])
    return state


def check_growth(grown: dict[str, Tensor], before: dict[str, Tensor], start: Any) -> None:
    """What must be kept is kept, what must be fresh is fresh, and shapes are as recorded."""
    newest = max((name for name in grown if ".branches." in name), default="")[:19]
    for name, value in grown.items():
        if name.startswith("exemplars"):
            continue
        assert value.shape == start[name].shape, name
        if name.startswith("auxiliary"):
            assert name not in before or not torch.equal(value, before[name])
        elif name.startswith("head"):
            old = before[name]
            close(value[tuple(slice(size) for size in old.shape)], old, 0)
        elif name in before:
            close(value, before[name], 0)
        else:
            copied = name.replace(newest, f"{newest[:-1]}{int(newest[-1]) - 1}")
            close(value, before[copied], 0)


@STAGES
def test_training_on_a_stub_as_released(golden: Path, name: str) -> None:
    files = sorted(golden.glob(f"train_stub_{name}_seed*.npz"))
    assert files
    for path in files:
        data = np.load(path)
        args = json.loads(str(data["args"]))
        learner = stub(name, args)
        for task in TASKS:
            before = {key: value.clone() for key, value in learner.modules().state_dict().items()}
            learner.begin_task(task, torch.Generator().manual_seed(task.index))
            state = learner.modules().state_dict()
            start = recorded(data, f"task{task.index}_start/")
            if task.index:
                check_growth(state, before, start)
            learner.modules().load_state_dict({key: start.get(key, state[key]) for key in state})
            use(learner, args, first=task.index == 0)
            replay_stub(learner, task, data)


def replay_stub(learner: Learner, task: TaskInfo, data: Any) -> None:
    at = f"task{task.index}"
    images = torch.from_numpy(data[f"{at}_x"]).double()
    labels = torch.from_numpy(data[f"{at}_y"]).long()
    first = data[f"{at}_ce_call0_logits"]
    close(logits_of(learner, images[0])[:, -first.shape[1] :], first, 1e-9)
    logged = train(learner, task, list(zip(images, labels, strict=True)) * 3)
    expected = list(data[f"{at}_ce_values"])
    for numbers in logged:
        named = numbers.get("classification", numbers["loss"])
        assert named.item() == pytest.approx(expected.pop(0), abs=1e-7)
        if "auxiliary" in numbers:
            assert numbers["auxiliary"].item() == pytest.approx(expected.pop(0), abs=1e-7)
    assert not expected
    if f"{at}_kd_values" in data.files:
        taught = torch.stack([numbers["distillation"] for numbers in logged])
        close(taught, data[f"{at}_kd_values"], 1e-7)
    end = recorded(data, f"{at}_end/")
    for key, value in learner.modules().state_dict().items():
        if not key.startswith("exemplars"):
            close(value, end[key], 1e-7)
    close(logits_of(learner, images[0]), data[f"{at}_logits"], 1e-7)


# --- e2e -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """The images of a split as the release sees them."""

    images: Tensor
    labels: Tensor

    @classmethod
    def of(cls, data: Any, split: str) -> Seen:
        images = torch.from_numpy(data[f"{split}_images"]).permute(0, 3, 1, 2).double() / 255
        return cls(images, torch.from_numpy(data[f"{split}_targets"]).long())

    def until(self, classes: int) -> Seen:
        rows = (self.labels < classes).nonzero()[:, 0]
        return Seen(self.images[rows], self.labels[rows])

    def of_class(self, position: int) -> Tensor:
        return (self.labels == position).nonzero()[:, 0]

    @torch.no_grad()
    def apply(self, function: Callable[[Tensor], Tensor], numbers_N: Tensor) -> Tensor:
        return function(self.images[numbers_N])


@dataclass(frozen=True)
class Stage:
    """One task of a recorded run, learnt, and its test stream answered."""

    task: TaskInfo
    learner: Learner
    features: Tensor
    labels: Tensor
    best: Tensor

    def accuracies(self, answers: Tensor) -> list[float]:
        right = (answers == self.labels).double()
        tasks = self.labels // 5
        return [100 * right[tasks == t].mean().item() for t in range(self.task.index + 1)]


def plain(stage: int, learner: Learner, features: Tensor) -> Tensor:
    """An evaluation that leaves the learner as it is."""
    return learner.adaptable().classify(features).topk(5, dim=1).indices


def released_arc(args: dict[str, Any]) -> After:
    """ARC's evaluation as released: with retention it adapts the head and freezes all else."""
    settings = ARCSettings.released(
        retention=args["adaptive_retention"],
        correction=args["adaptive_correction"],
        beta=args["confidence_threshold"],
        gamma=args["ood_threshold"],
        temperature=args["iterative_temperature"],
        lr=args["adjust_lr"],
    )
    batch = args["batch_size" if args["model_name"] == "icarl" else "arc_batch_size"]

    def after(stage: int, learner: Learner, features: Tensor) -> Tensor:
        head = learner.adaptable().head()
        arc = ARC(head, tasks=[5] * (stage + 1), settings=settings)
        decision: Decision = arc.replay(features, batch_size=batch)
        if settings.retention:
            assert arc.bias is not None
            head.weight.copy_(arc.weight)
            head.bias.copy_(arc.bias)
            learner.modules().requires_grad_(False)
            head.requires_grad_(True)
        return decision.top(5)

    return after


def run(data: Any, images: Any, learner: Learner, after: After) -> Iterator[Stage]:
    """A recorded run task by task; `after` answers a stage, and may change the learner."""
    args = json.loads(str(data["args"]))
    training, test = Seen.of(images, "train"), Seen.of(images, "test")
    for task in TASKS:
        at = f"task{task.index}"
        learner.begin_task(task, torch.Generator().manual_seed(task.index))
        head = learner.adaptable().head()
        start = torch.from_numpy(data[f"{at}_head_start_W"])
        with torch.no_grad():
            close(head.weight[: task.old_classes], start[: task.old_classes], 1e-6)
            head.weight.copy_(start)
        use(learner, args, first=task.index == 0)
        rows = [torch.from_numpy(row[row >= 0]).long() for row in data[f"{at}_batches"]]
        train(learner, task, [(training.images[row], training.labels[row]) for row in rows])
        close(head.weight, data[f"{at}_head_trained_W"], 1e-6)
        close(head.bias, data[f"{at}_head_trained_b"], 1e-6)
        learner.end_task(task, training, torch.Generator())
        stream = test.until(task.seen_classes)
        with torch.no_grad():
            features = learner.adaptable().features(stream.images)
            best = after(task.index, learner, features)
        close(head.weight, data[f"{at}_head_after_eval_W"], 1e-6)
        close(head.bias, data[f"{at}_head_after_eval_b"], 1e-6)
        yield Stage(task, learner, features, stream.labels, best)


def backbone_of(data: Any) -> VisionTransformer:
    start = "init_backbone/"
    state = {
        name.removeprefix(start): torch.from_numpy(data[name])
        for name in data.files
        if name.startswith(start)
    }
    with torch.random.fork_rng(devices=[]):
        shape: dict[str, Any] = {
            "img_size": 32,
            "patch_size": 8,
            "embed_dim": 24,
            "depth": 2,
            "num_heads": 3,
        }
        backbone = VisionTransformer(**shape, num_classes=0)
    backbone.load_state_dict(state)
    return backbone.double()


@pytest.mark.parametrize(
    "case",
    ["finetune_plain", "icarl_plain", "finetune_arc", "icarl_arc", "finetune_correction_only"],
)
def test_end_to_end_as_released(golden: Path, case: str) -> None:
    name, _, form = case.partition("_")
    module, memory = (icarl, {"memory": 45}) if name == "icarl" else (finetune, {})
    files = sorted(golden.glob(f"e2e_{case}_seed*.npz"))
    assert files
    for path in files:
        seed = path.stem.rpartition("_")[2]
        data, images = np.load(path), np.load(golden / f"e2e_data_{seed}.npz")
        args = json.loads(str(data["args"]))
        if memory:
            memory = {"memory": args["memory_size"]}
        backbone = backbone_of(np.load(golden / f"e2e_{name}_plain_{seed}.npz"))
        before = {key: value.clone() for key, value in backbone.state_dict().items()}
        learner: Learner = module.create(backbone, settings_of(module, args, **memory))
        after = plain if form == "plain" else released_arc(args)
        for stage in run(data, images, learner, after):
            check_stage(stage, data)
            now = backbone.state_dict()
            change = max((now[key] - before[key]).abs().max().item() for key in now)
            expected = data["backbone_max_change_in_task"][stage.task.index]
            assert change == pytest.approx(expected, abs=1e-6)
            before = {key: value.clone() for key, value in now.items()}
        for key, value in backbone.state_dict().items():
            if f"final_backbone/{key}" in data.files:
                close(value, data[f"final_backbone/{key}"], 1e-6)


def check_stage(stage: Stage, data: Any) -> None:
    at, index = f"task{stage.task.index}", stage.task.index
    assert stage.best.tolist() == data[f"{at}_pred_top5"].tolist()
    expected = data["R"][index, : index + 1]
    assert stage.accuracies(stage.best[:, 0]) == pytest.approx(expected)
    if f"{at}_exemplars" in data.files:
        assert stage.learner.rehearsal().tolist() == data[f"{at}_exemplars"].tolist()
        learner = cast(icarl.ICaRL, stage.learner)
        nearest = learner.distances_to_means(stage.features).argmin(dim=1)
        assert nearest.tolist() == data[f"{at}_nme_top1"].tolist()
        expected = data["R_nme"][index, : index + 1]
        assert stage.accuracies(nearest) == pytest.approx(expected)
