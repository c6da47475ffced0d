"""The keys of a released JSON file as settings of our learners, one function a learner.

What is not in a file (SGD's momentum, how often classes are drawn) is the released recipe's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from arc_cl.errors import ConfigurationError
from arc_cl.experiments import _pilot_files as files
from arc_cl.experiments.spec import Value

_FROZEN = {"blocks", "patch_embed", "cls_token", "norm", "pos_embed"}


def need(holds: bool, name: str, value: object, expected: str, where: str) -> None:
    """A value that is not what it must be is an error."""
    if not holds:
        raise ConfigurationError(f"{where}: {name} is {value!r}, expected {expected}")


def _finetune(file: files.Finetune, where: str) -> dict[str, Value]:
    for first, later in (("init_lr", "lrate"), ("init_lr_decay", "lrate_decay")):
        one, other = getattr(file, first), getattr(file, later)
        need(one == other, first, one, f"the value of {later}, {other}: one serves all", where)
    return {
        "lr": file.lrate,
        "epochs_first": file.init_epoch,
        "epochs": file.epochs,
        "batch_size": file.batch_size,
        "weight_decay_first": file.init_weight_decay,
        "weight_decay": file.weight_decay,
        "milestones_first": file.init_milestones,
        "milestones": file.milestones,
        "lr_decay": file.lrate_decay,
    }


def _rehearsed(file: files.Rehearsed, where: str) -> dict[str, Value]:
    settings = _finetune(file, where)
    if not file.fixed_memory:
        return settings | {"memory": file.memory_size, "memory_rule": "total"}
    if file.memory_per_class is None:
        raise ConfigurationError(f"{where} lacks memory_per_class, which fixed_memory asks for")
    return settings | {"memory": file.memory_per_class, "memory_rule": "per_class"}


def _icarl(file: files.ICaRL, where: str) -> dict[str, Value]:
    return _rehearsed(file, where) | {"temperature": file.T}


def _memo(file: files.MEMO, where: str) -> dict[str, Value]:
    return _rehearsed(file, where) | {"alpha_aux": file.alpha_aux}


def _prompts(file: files.Prompted, where: str) -> dict[str, Value]:
    for name in ("weight_decay", "drop", "drop_path"):
        value = getattr(file, name)
        need(value == 0, name, value, "0: prompts are learnt without it", where)
    return {
        "lr": file.init_lr,
        "epochs_first": file.tuned_epoch,
        "epochs": file.tuned_epoch,
        "batch_size": file.batch_size,
    }


def _pooled(file: files.Pooled, where: str) -> dict[str, Value]:
    left = sorted(_FROZEN - set(file.freeze))
    need(not left, "freeze", list(file.freeze), f"{', '.join(left)} in it as well", where)
    return _prompts(file, where) | {
        "pool": file.size,
        "selection": "batch" if file.batchwise_prompt else "sample",
        "pull": file.pull_constraint_coeff if file.pull_constraint else 0.0,
    }


def _l2p(file: files.L2P, where: str) -> dict[str, Value]:
    return _pooled(file, where) | {"prompt_length": file.length, "top_k": file.top_k}


def _dualprompt(file: files.DualPrompt, where: str) -> dict[str, Value]:
    return _pooled(file, where) | {
        "general_layers": file.g_prompt_layer_idx,
        "general_length": file.g_prompt_length,
        "expert_layers": file.e_prompt_layer_idx,
        "expert_length": file.length,
        "transfer": file.shared_prompt_pool,
    }


def _coda_prompt(file: files.CODAPrompt, where: str) -> dict[str, Value]:
    given = file.prompt_param
    whole = len(given) == 3 and all(one > 0 and one == int(one) for one in given[:2])
    expected = "components, length (both whole), and the weight of orthogonality"
    need(whole and given[2] >= 0, "prompt_param", list(given), expected, where)
    return _prompts(file, where) | {
        "components": int(given[0]),
        "prompt_length": int(given[1]),
        "orthogonality": given[2],
    }


def _slca(file: files.SLCA, where: str) -> dict[str, Value]:
    return {
        "lr": file.lrate,
        "lr_backbone": file.lrate * file.bcb_lrscale,
        "epochs_first": file.epochs,
        "epochs": file.epochs,
        "batch_size": file.batch_size,
        "weight_decay": file.weight_decay,
        "milestones": file.milestones,
        "lr_decay": file.lrate_decay,
        "alignment_epochs": file.ca_epochs,
        "logit_norm": file.ca_with_logit_norm,
    }


TRANSLATORS: Mapping[str, Callable[[Any, str], dict[str, Value]]] = {
    "finetune": _finetune,
    "icarl": _icarl,
    "der": _rehearsed,
    "memo": _memo,
    "l2p": _l2p,
    "dualprompt": _dualprompt,
    "coda_prompt": _coda_prompt,
    "slca": _slca,
}
