"""The released JSON files as recipes: each key is understood, or said to have no effect here.

The files here are written by hand. Where ARC_CL_PILOT_CONFIGS names a folder of real ones, those
of the eight learners are translated too.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from arc_cl import catalogue
from arc_cl.errors import ConfigurationError
from arc_cl.experiments import _pilot_files as files
from arc_cl.experiments.fields import build, names
from arc_cl.experiments.hyperparameters import BACKBONES, RELEASED_ARC
from arc_cl.experiments.pilot import read
from arc_cl.experiments.recipes import LEARNERS, recipe

DATA = {"cifar100": ("cifar224", 10), "imagenet_r": ("imagenetr", 20)}
SGD = {
    "init_lr": 1e-3,
    "init_milestones": [60, 120, 170],
    "init_lr_decay": 0.1,
    "init_weight_decay": 5e-4,
    "lrate": 1e-3,
    "lrate_decay": 0.1,
    "weight_decay": 2e-4,
}
MEMO = {
    "scheduler": "steplr",
    "train_base": False,
    "train_adaptive": False,
    "debug": False,
    "skip": False,
    "t_max": None,
    "alpha_aux": 1.0,
}
ADAM = {
    "weight_decay": 0,
    "min_lr": 1e-5,
    "optimizer": "adam",
    "reinit_optimizer": True,
    "pretrained": True,
    "drop": 0.0,
    "drop_path": 0.0,
}
POOL = {
    "scheduler": "constant",
    "global_pool": "token",
    "freeze": ["blocks", "patch_embed", "cls_token", "norm", "pos_embed"],
    "get_original_backbone": True,
    "prompt_pool": True,
    "size": 10,
    "length": 5,
    "initializer": "uniform",
    "prompt_key": True,
    "prompt_key_init": "uniform",
    "shared_prompt_key": False,
    "batchwise_prompt": True,
    "embedding_key": "cls",
    "predefined_key": "",
    "pull_constraint": True,
    "pull_constraint_coeff": 0.1,
}
L2P = {
    "top_k": 5,
    "head_type": "prompt",
    "use_prompt_mask": False,
    "shared_prompt_pool": False,
}
DUALPROMPT = {
    "top_k": 1,
    "head_type": "token",
    "use_prompt_mask": True,
    "shared_prompt_pool": True,
    "use_g_prompt": True,
    "g_prompt_length": 5,
    "g_prompt_layer_idx": [0, 1],
    "use_prefix_tune_for_g_prompt": True,
    "use_e_prompt": True,
    "e_prompt_layer_idx": [2, 3, 4],
    "use_prefix_tune_for_e_prompt": True,
    "same_key_value": False,
}
SLCA = {
    "lrate": 1e-2,
    "weight_decay": 5e-4,
    "lrate_decay": 0.1,
    "ca_epochs": 3,
    "ca_with_logit_norm": 0.1,
    "model_postfix": "20e",
}


def sgd(
    first: int, later: int, batch: int, milestones: list[int], **more: object
) -> dict[str, Any]:
    own = {"init_epoch": first, "epochs": later, "batch_size": batch, "milestones": milestones}
    return SGD | own | more


def prompts(lr: float, epochs: int, batch: int, **more: object) -> dict[str, Any]:
    return ADAM | {"init_lr": lr, "tuned_epoch": epochs, "batch_size": batch} | more


OWN: dict[tuple[str, str], dict[str, Any]] = {
    ("finetune", "cifar100"): sgd(20, 20, 128, [40, 70]),
    ("finetune", "imagenet_r"): sgd(20, 20, 128, [40, 70]),
    ("icarl", "cifar100"): sgd(20, 20, 128, [80, 120], T=2),
    ("icarl", "imagenet_r"): sgd(10, 10, 32, [80, 120], T=2),
    ("der", "cifar100"): sgd(10, 10, 32, [80, 120, 150], T=2),
    ("der", "imagenet_r"): sgd(10, 10, 64, [80, 120, 150], T=2),
    ("memo", "cifar100"): sgd(10, 20, 32, [80, 120, 150], **MEMO),
    ("memo", "imagenet_r"): sgd(10, 10, 32, [80, 120, 150], **MEMO),
    ("l2p", "cifar100"): prompts(1.875e-3, 5, 16, **POOL, **L2P),
    ("l2p", "imagenet_r"): prompts(1.875e-3, 10, 32, **POOL, **L2P),
    ("dualprompt", "cifar100"): prompts(1e-3, 5, 24, **POOL, **DUALPROMPT),
    ("dualprompt", "imagenet_r"): prompts(1e-3, 10, 24, **POOL, **DUALPROMPT),
    ("coda_prompt", "cifar100"): prompts(
        1e-3, 20, 128, scheduler="cosine", prompt_param=[100, 8.0, 0.0]
    ),
    ("coda_prompt", "imagenet_r"): prompts(
        1e-3, 50, 128, scheduler="cosine", prompt_param=[100, 8.0, 0.0]
    ),
    ("slca", "cifar100"): SLCA | {"epochs": 20, "milestones": [18], "batch_size": 64},
    ("slca", "imagenet_r"): SLCA | {"epochs": 5, "milestones": [40], "batch_size": 64},
}

# learner, data: rate of the head, of the prompts, β, γ, T, soft labels, entropy, batch
ARC: dict[tuple[str, str], tuple[Any, ...]] = {
    ("finetune", "cifar100"): (3e-6, None, 0.8, 1.5, 1.1, True, True, 16),
    ("finetune", "imagenet_r"): (5e-6, None, 0.6, 1.0, 1.1, True, True, 128),
    ("icarl", "cifar100"): (1e-5, None, 0.7, 1.5, 1.1, False, True, None),
    ("icarl", "imagenet_r"): (1e-5, None, 0.7, 1.5, 1.1, False, False, None),
    ("der", "cifar100"): (1e-6, None, 0.7, 1.0, 1.1, True, True, 16),
    ("der", "imagenet_r"): (1e-6, None, 0.6, 1.5, 1.1, True, True, 32),
    ("memo", "cifar100"): (1e-6, None, 0.7, 1.5, 1.1, True, True, 32),
    ("memo", "imagenet_r"): (5e-7, None, 0.7, 1.5, 1.1, True, True, 32),
    ("l2p", "cifar100"): (5e-6, 5e-4, 0.7, 0.7, 1.5, False, True, 2),
    ("l2p", "imagenet_r"): (5e-6, 1e-3, 0.7, 1.0, 1.5, True, True, 2),
    ("dualprompt", "cifar100"): (1e-6, 5e-4, 0.5, 0.7, 1.5, False, True, 1),
    ("dualprompt", "imagenet_r"): (1e-6, 3e-4, 0.9, 0.6, 1.5, False, True, 1),
    ("coda_prompt", "cifar100"): (1e-6, 5e-6, 0.5, 1.0, 1.5, True, True, 1),
    ("coda_prompt", "imagenet_r"): (1e-6, 5e-5, 0.7, 0.7, 1.5, True, True, 4),
}


def shared(learner: str, data: str) -> dict[str, Any]:
    dataset, size = DATA[data]
    keeps, coda = learner in ("icarl", "der", "memo"), learner == "coda_prompt"
    has_variant = learner in ("memo", "l2p", "dualprompt", "coda_prompt")
    return {
        "prefix": "reproduce",
        "dataset": dataset,
        "memory_size": (2000 if data == "cifar100" else 4000) if keeps else 0,
        "memory_per_class": 20 if keeps else 0,
        "fixed_memory": keeps and data == "imagenet_r",
        "shuffle": not coda,
        "init_cls": size,
        "increment": size,
        "model_name": learner,
        "backbone_type": "vit_base_patch16_224" + (f"_{learner}" if has_variant else ""),
        "device": ["0"],
        "seed": [0] if coda else [1993],
    }


def of_pilot(learner: str, data: str = "cifar100", **changes: object) -> dict[str, Any]:
    """A file of PILOT's."""
    return shared(learner, data) | OWN[learner, data] | changes


def of_arc(learner: str, data: str = "cifar100", **changes: object) -> dict[str, Any]:
    """A file of ARC's release."""
    lr, prompt, beta, gamma, temperature, soft, entropy, batch = ARC[learner, data]
    rates = {"adjust_lr": lr}
    if prompt:
        rates = {"adjust_head_lr": lr, "adjust_prompt_lr": prompt, "train_prompt": True}
    keys = {
        "iterative_temperature": temperature,
        "ood_threshold": gamma,
        "confidence_threshold": beta,
        "soften_labels": soft,
        "adaptive_retention": True,
        "adaptive_correction": True,
        "entropy_loss": entropy,
        "cross_entropy_loss": True,
        "hard_adjust": False,
    }
    batches = {"arc_batch_size": batch} if batch else {}
    return of_pilot(learner, data) | rates | keys | batches | changes


@pytest.mark.parametrize(("learner", "data"), OWN)
def test_a_file_of_pilot_is_the_released_recipe(learner: str, data: str) -> None:
    found = read(json.dumps(of_pilot(learner, data)), "file.json")
    expected = recipe(learner, data, "released")
    assert found.recipe.setup == expected.setup
    assert found.recipe.settings == expected.settings
    assert found.recipe.origins == expected.origins
    assert (found.arc, found.recipe.arc) == (None, None)
    assert found.seeds == ((0,) if learner == "coda_prompt" else (1993,))


@pytest.mark.parametrize(("learner", "data"), ARC)
def test_a_file_of_arc_holds_its_values_too(learner: str, data: str) -> None:
    found = read(of_arc(learner, data))
    assert found.recipe.settings == recipe(learner, data, "released").settings
    assert found.arc == found.recipe.arc == RELEASED_ARC[learner, data]
    prompted = learner in ("l2p", "dualprompt", "coda_prompt")
    assert found.recipe.setup.coupling == ("none" if prompted else "released")
    assert ("train_prompt" in found.ignored) == prompted


@pytest.mark.parametrize("learner", LEARNERS)
def test_the_settings_are_those_of_the_learner(learner: str) -> None:
    settings = catalogue.load("learners", learner).Settings
    found = read(of_pilot(learner))
    build(settings, found.recipe.settings, learner)
    assert set(found.recipe.settings) == set(names(settings))


@pytest.mark.parametrize(("learner", "data"), ARC)
def test_every_key_is_used_or_said_to_have_no_effect(learner: str, data: str) -> None:
    held = of_arc(learner, data)
    ignored = read(held).ignored
    assert set(ignored) <= set(held)
    assert all(ignored.values())
    assert {"prefix", "device", "hard_adjust"} <= set(ignored)
    # What is ignored changes nothing.
    left = {name: value for name, value in held.items() if name not in ignored}
    needed = {"memory_size", "train_prompt"} & (set(held) - set(left))
    again = read(left | {name: held[name] for name in needed})
    assert (again.recipe, again.arc) == (read(held).recipe, read(held).arc)


def test_pilots_epochs_of_icarl_on_imagenet_r_are_released_as_well() -> None:
    found = read(of_pilot("icarl", "imagenet_r", init_epoch=20, epochs=20)).recipe
    assert (found.settings["epochs"], found.origins["epochs"]) == (20, "released")
    assert read(of_pilot("icarl", epochs=21)).recipe.origins["epochs"] == "ours"


def test_tasks_data_and_weights() -> None:
    found = read(
        of_pilot(
            "finetune",
            dataset="5-dataset",
            init_cls=20,
            increment=5,
            shuffle=False,
            backbone_type="pretrained_vit_b16_224_in21k",
        )
    ).recipe.setup
    assert (found.data, found.first_classes, found.classes_per_task) == ("five_datasets", 20, 5)
    assert (found.class_order, found.backbone) == ("natural", BACKBONES["paper"])
    assert (found.variant, found.normalise, found.transform) == ("released", "none", "pilot")


def test_each_seed_has_its_own_class_order() -> None:
    found = read(of_pilot("der", seed=[1993, 7]))
    assert (found.seeds, found.recipe.setup.class_order) == ((1993, 7), 1993)
    assert found.for_seed(7).setup.class_order == 7
    natural = read(of_pilot("coda_prompt", seed=[0, 1]))
    assert natural.for_seed(1) == natural.recipe
    assert natural.recipe.setup.class_order == "natural"


def test_the_memory_that_counts() -> None:
    total = read(of_pilot("icarl", memory_size=500))
    assert (total.recipe.settings["memory"], total.recipe.settings["memory_rule"]) == (500, "total")
    assert "memory_per_class" in total.ignored
    each = read(of_pilot("icarl", fixed_memory=True, memory_per_class=7))
    assert (each.recipe.settings["memory"], each.recipe.settings["memory_rule"]) == (7, "per_class")
    assert "memory_size" in each.ignored
    assert read(of_pilot("finetune", memory_size=2000)).recipe.settings["memory"] == 0


def test_prompts() -> None:
    found = read(
        of_pilot("dualprompt", batchwise_prompt=False, size=20, g_prompt_layer_idx=[0], length=6)
    ).recipe.settings
    assert (found["selection"], found["pool"], found["expert_length"]) == ("sample", 20, 6)
    assert (found["general_layers"], found["prefix_order"]) == ((0,), "scrambled")
    assert read(of_pilot("l2p", pull_constraint=False)).recipe.settings["pull"] == 0.0
    coda = read(of_pilot("coda_prompt", prompt_param=[50, 4, 0.5])).recipe.settings
    assert (coda["components"], coda["prompt_length"], coda["orthogonality"]) == (50, 4, 0.5)


def test_the_backbone_of_slca_learns_at_a_share_of_the_rate() -> None:
    assert read(of_pilot("slca")).recipe.settings["lr_backbone"] == pytest.approx(1e-4)
    found = read(of_pilot("slca", bcb_lrscale=0, ca_with_logit_norm=0)).recipe.settings
    assert (found["lr_backbone"], found["logit_norm"]) == (0.0, 0.0)


def test_arc_in_part() -> None:
    correction = read(of_arc("der", adaptive_retention=False))
    assert correction.arc is not None
    assert (correction.arc.retention, correction.recipe.setup.coupling) == (False, "none")
    head = read(of_arc("l2p", train_prompt=False)).arc
    assert head is not None
    assert (head.lr_prompt, head.optimizer, head.shuffled) == (None, "adam", True)
    assert read(of_arc("icarl", arc_batch_size=4)).arc == RELEASED_ARC["icarl", "cifar100"]


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        (of_pilot("icarl", batch_sise=3), "x.json has no 'batch_sise'; did you mean 'batch_size'"),
        (of_pilot("finetune", adjust_rl=3), "did you mean 'adjust_lr'"),
        (of_pilot("slca", adjust_lr=1e-6), "x.json has no 'adjust_lr'"),
        (of_pilot("icarl", model_name="icarll"), "did you mean 'icarl'"),
        (of_pilot("icarl", model_name="simplecil"), "no 'simplecil'"),
        (of_pilot("icarl", model_name=3), "x.json: model_name is 3, expected one of finetune"),
        (of_pilot("icarl", dataset="cifar225"), "did you mean 'cifar224'"),
        (
            of_pilot("icarl", dataset="cub"),
            "the list of what dataset may be in x.json has no 'cub'",
        ),
        (of_pilot("icarl", backbone_type="resnet18"), "no 'resnet18'"),
        (of_pilot("l2p", backbone_type="vit_base_patch16_224"), "mean 'vit_base_patch16_224_l2p'"),
        (of_pilot("icarl", batch_size="16"), "batch_size is '16', expected a whole number"),
        (of_pilot("icarl", batch_size=0), "batch_size is 0, expected a number above 0"),
        (of_pilot("icarl", epochs=-3), "epochs is -3, expected a number above 0"),
        (of_pilot("icarl", init_cls=0), "init_cls is 0"),
        (of_pilot("icarl", init_cls=101), "init_cls is 101, cifar100 has 100"),
        (of_pilot("icarl", milestones=[-1]), r"milestones is \[-1\], expected numbers from 0 on"),
        (of_pilot("icarl", memory_size=-1), "memory_size is -1, expected 0 or more"),
        (of_pilot("icarl", fixed_memory=True, memory_per_class=None), "lacks memory_per_class"),
        (of_pilot("icarl", seed=1993), "seed is 1993, expected a list"),
        (of_pilot("icarl", seed=[]), r"seed is \[\], expected seeds from 0 on"),
        (of_pilot("icarl", seed=[2**32]), "expected seeds from 0 on"),
        (of_pilot("icarl", lrate=2e-3), "init_lr is 0.001, expected the value of lrate, 0.002"),
        (of_pilot("icarl", lrate_decay=0.5), "init_lr_decay is 0.1, expected the value of lrate_"),
        (of_pilot("memo", train_base=True), "train_base is True, expected False"),
        (of_pilot("memo", scheduler="cosine"), "scheduler is 'cosine', expected 'steplr'"),
        (of_pilot("l2p", optimizer="sgd"), "optimizer is 'sgd', expected 'adam'"),
        (of_pilot("l2p", pretrained=False), "pretrained is False, expected True"),
        (of_pilot("l2p", weight_decay=0.1), "weight_decay is 0.1, expected 0"),
        (of_pilot("l2p", drop=0.1), "drop is 0.1, expected 0"),
        (of_pilot("l2p", freeze=["blocks"]), "freeze is .*, expected cls_token, norm, patch_"),
        (of_pilot("l2p", shared_prompt_pool=True), "shared_prompt_pool is True, expected False"),
        (of_pilot("dualprompt", top_k=2), "top_k is 2, expected 1"),
        (of_pilot("dualprompt", use_e_prompt=False), "use_e_prompt is False, expected True"),
        (of_pilot("coda_prompt", prompt_param=[100, 8]), "prompt_param is .*, expected components"),
        (of_pilot("coda_prompt", prompt_param=[100.5, 8, 0]), "prompt_param is"),
        (of_arc("der", confidence_threshold=1.5), "x.json, the keys of ARC: .*beta=1.5"),
        (of_arc("der", soften_labels=1), "soften_labels is 1, expected true or false"),
        (of_arc("der", arc_batch_size=0), "arc_batch_size is 0, expected a number above 0"),
    ],
)
def test_mistakes_and_what_we_cannot_do(held: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        read(held, "x.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=3,
)


@given(place=st.sampled_from(sorted(ARC)), pick=st.integers(0, 999), value=JSON)
@example(place=("coda_prompt", "cifar100"), pick=0, value=[1e308, 8, 0])
def test_any_value_is_taken_or_refused(place: tuple[str, str], pick: int, value: object) -> None:
    held = of_arc(*place)
    key = sorted(held)[pick % len(held)]
    for changed in ({key: value}, {str(value): value}):
        try:
            found = read(json.dumps(held | changed), "x.json")
        except ConfigurationError as error:
            assert "x.json" in str(error)  # noqa: PT017
            continue
        with suppress(ConfigurationError):  # the learner has its own say, at once as well
            build(catalogue.load("learners", place[0]).Settings, found.recipe.settings, "here")


@pytest.mark.parametrize("missing", ["epochs", "memory_size", "seed", "backbone_type", "dataset"])
def test_a_missing_key_shows_at_once(missing: str) -> None:
    held = of_pilot("icarl")
    del held[missing]
    with pytest.raises(ConfigurationError, match=f"x.json(: | lacks ){missing}"):
        read(held, "x.json")


def test_arc_takes_all_of_its_keys_or_none() -> None:
    held = of_arc("finetune")
    del held["arc_batch_size"]
    with pytest.raises(ConfigurationError, match="lacks arc_batch_size"):
        read(held, "x.json")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "x.json is not JSON: .*line 1"),
        ("[]", "x.json holds no JSON object"),
        ('{"epochs": 1, "epochs": 2}', "x.json names epochs twice"),
    ],
)
def test_what_is_no_configuration(text: str, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        read(text, "x.json")


def test_every_known_key_is_in_some_file_of_the_tests() -> None:
    seen = {name for learner, data in OWN for name in of_pilot(learner, data)}
    seen |= {name for learner, data in ARC for name in of_arc(learner, data)}
    kinds = [*files.FILES.values(), *files.ARC.values()]
    known = {name for kind in kinds for name in names(kind)}
    # Read by the released code, and in none of its files.
    assert known - seen == {"bcb_lrscale", "save_before_ca", "print_forget"}


def real_files() -> list[Path]:
    folder = os.environ.get("ARC_CL_PILOT_CONFIGS")
    found = sorted(Path(folder).rglob("*.json")) if folder else []
    texts = {path: path.read_text(encoding="utf-8") for path in found}
    names_ = "|".join(LEARNERS)
    return [p for p, text in texts.items() if re.search(rf'"model_name": *"({names_})"', text)]


def test_real_files() -> None:
    paths = real_files()
    if not paths:
        pytest.skip("ARC_CL_PILOT_CONFIGS names no folder with files of the eight learners")
    for path in paths:
        found = read(path.read_text(encoding="utf-8"), path.name)
        setup = found.recipe.setup
        settings = catalogue.load("learners", setup.learner).Settings
        build(settings, found.recipe.settings, path.name)
        assert "ours" not in found.recipe.origins.values(), path
        assert found.arc in (None, RELEASED_ARC.get((setup.learner, setup.data))), path
