"""What the released JSON files may hold, per learner: names, types, and the one value of some.

A key with a single allowed value chooses something that our learner cannot do otherwise. A key
with a `reason` is read and has no effect here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias


def _unused(reason: str) -> Any:
    return field(default=None, metadata={"reason": reason})


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Of every file."""

    model_name: str
    dataset: str
    backbone_type: str
    shuffle: bool
    seed: tuple[int, ...]
    init_cls: int
    increment: int
    batch_size: int
    memory_size: int | None = _unused("the released code keeps no exemplars for this learner")
    memory_per_class: int | None = _unused("the released code keeps no exemplars for this learner")
    fixed_memory: bool | None = _unused("the released code keeps no exemplars for this learner")
    device: tuple[str | int, ...] | None = _unused("the device is chosen by --devices")
    prefix: str | None = _unused("part of the name of the released log file")
    print_forget: bool | None = _unused("forgetting is always recorded")


@dataclass(frozen=True, kw_only=True)
class Finetune(Shared):
    init_epoch: int
    init_lr: float
    init_milestones: tuple[int, ...]
    init_lr_decay: float
    init_weight_decay: float
    epochs: int
    lrate: float
    milestones: tuple[int, ...]
    lrate_decay: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class Rehearsed(Finetune):
    """Of learners that keep exemplars."""

    memory_size: int = field()  # required here: the default above must not be inherited
    memory_per_class: int | None = None
    fixed_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class ICaRL(Rehearsed):
    T: float


@dataclass(frozen=True, kw_only=True)
class DER(Rehearsed):
    T: float | None = _unused("DER distils nothing: its released code never reads T")


@dataclass(frozen=True, kw_only=True)
class MEMO(Rehearsed):
    alpha_aux: float
    scheduler: Literal["steplr"]
    train_base: Literal[False]
    train_adaptive: Literal[False]
    skip: Literal[False] = False
    t_max: int | None = _unused("of a cosine schedule; this one goes by milestones")
    debug: bool | None = _unused("the released code never reads it")


@dataclass(frozen=True, kw_only=True)
class Prompted(Shared):
    tuned_epoch: int
    init_lr: float
    weight_decay: float
    optimizer: Literal["adam"]
    pretrained: Literal[True]
    drop: float = 0.0
    drop_path: float = 0.0
    min_lr: float | None = _unused("this schedule has no lower end")


@dataclass(frozen=True, kw_only=True)
class Pooled(Prompted):
    """L2P and DualPrompt."""

    scheduler: Literal["constant"]
    reinit_optimizer: Literal[True]
    freeze: tuple[str, ...]
    get_original_backbone: Literal[True]
    prompt_pool: Literal[True]
    prompt_key: Literal[True]
    size: int
    length: int
    top_k: int
    batchwise_prompt: bool
    pull_constraint: bool
    pull_constraint_coeff: float
    shared_prompt_key: Literal[False]
    global_pool: Literal["token"] = "token"
    initializer: Literal["uniform"] = "uniform"
    prompt_key_init: Literal["uniform"]
    embedding_key: Literal["cls"]
    predefined_key: Literal[""] = ""


@dataclass(frozen=True, kw_only=True)
class L2P(Pooled):
    head_type: Literal["prompt"]
    use_prompt_mask: Literal[False]
    shared_prompt_pool: Literal[False]


@dataclass(frozen=True, kw_only=True)
class DualPrompt(Pooled):
    top_k: Literal[1]
    head_type: Literal["token"]
    use_prompt_mask: Literal[True]
    shared_prompt_pool: bool
    use_g_prompt: Literal[True]
    g_prompt_length: int
    g_prompt_layer_idx: tuple[int, ...]
    use_prefix_tune_for_g_prompt: Literal[True]
    use_e_prompt: Literal[True]
    e_prompt_layer_idx: tuple[int, ...]
    use_prefix_tune_for_e_prompt: Literal[True]
    same_key_value: Literal[False]


@dataclass(frozen=True, kw_only=True)
class CODAPrompt(Prompted):
    scheduler: Literal["cosine"]
    prompt_param: tuple[float, ...]
    reinit_optimizer: bool | None = _unused("the released code never reads it: a new one a task")


@dataclass(frozen=True, kw_only=True)
class SLCA(Shared):
    epochs: int
    lrate: float
    milestones: tuple[int, ...]
    lrate_decay: float
    weight_decay: float
    ca_epochs: int
    ca_with_logit_norm: float = 0.0
    bcb_lrscale: float = 0.01
    model_postfix: str | None = _unused("part of the name of the released checkpoints")
    save_before_ca: bool | None = _unused("every stage is stored with the heads before alignment")


FILES: Mapping[str, type[Shared]] = {
    "finetune": Finetune,
    "icarl": ICaRL,
    "der": DER,
    "memo": MEMO,
    "l2p": L2P,
    "dualprompt": DualPrompt,
    "coda_prompt": CODAPrompt,
    "slca": SLCA,
}


@dataclass(frozen=True, kw_only=True)
class ARCKeys:
    """What ARC's release adds to a file."""

    iterative_temperature: float
    ood_threshold: float
    confidence_threshold: float
    soften_labels: bool
    adaptive_retention: bool
    adaptive_correction: bool
    entropy_loss: bool
    cross_entropy_loss: bool
    hard_adjust: bool | None = _unused("the released code never reads it")


@dataclass(frozen=True, kw_only=True)
class ARCOfICaRL(ARCKeys):
    adjust_lr: float
    arc_batch_size: int | None = _unused("iCaRL's released code adapts in batches as in training")


@dataclass(frozen=True, kw_only=True)
class ARCOfHead(ARCKeys):
    adjust_lr: float
    arc_batch_size: int


@dataclass(frozen=True, kw_only=True)
class ARCOfPrompts(ARCKeys):
    adjust_head_lr: float
    adjust_prompt_lr: float
    train_prompt: bool
    arc_batch_size: int


AnyARC: TypeAlias = ARCOfICaRL | ARCOfHead | ARCOfPrompts

ARC: Mapping[str, type[AnyARC]] = {
    "finetune": ARCOfHead,
    "icarl": ARCOfICaRL,
    "der": ARCOfHead,
    "memo": ARCOfHead,
    "l2p": ARCOfPrompts,
    "dualprompt": ARCOfPrompts,
    "coda_prompt": ARCOfPrompts,
}
"""Nothing was released for SLCA."""
