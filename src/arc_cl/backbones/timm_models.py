"""Backbones by name, with their weights: timm's, and our own `glyph_vit`.

Weights are "pretrained" (timm downloads them), "random" (from a seed), or a file. Wherever they
come from, their sha256 is kept: of the file, or else of the tensors in the order of their names.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import timm
import torch
from safetensors.torch import load as safetensors_load
from torch import Tensor, nn

from arc_cl.backbones import tiny
from arc_cl.errors import ConfigurationError, DataError

_PICKLED = (".pth", ".pt", ".bin")
_CLASSIFIERS = ("head", "head_dist", "fc", "classifier")
_WRAPPERS = ("state_dict", "model")
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A backbone in eval mode (images [B,C,H,W] to features [B,D]), and what it expects."""

    module: nn.Module
    name: str
    """With the tag that timm resolved."""
    weights: str
    """As asked for: `pretrained`, `random`, or the file."""
    sha256: str
    mean: tuple[float, ...]
    """A channel, of images in 0..1."""
    std: tuple[float, ...]
    image_size: int


def load(name: str, weights: str = "pretrained", seed: int = 0) -> Loaded:
    """The backbone of that name; `seed` is that of random weights.

    A bare timm name means the tag that the installed timm prefers: `Loaded.name` tells which.
    """
    if name == "glyph_vit":
        return _glyph_vit(weights, seed)
    _check_name(name)
    module = _made(name, weights == "pretrained", seed)
    sha256 = _of_tensors(module) if weights == "pretrained" else _fill(module, name, weights)
    expected = module.pretrained_cfg
    assert isinstance(expected, dict)
    return Loaded(
        module=module.eval(),
        name=".".join(part for part in (expected["architecture"], expected["tag"]) if part),
        weights=weights,
        sha256=sha256,
        mean=tuple(expected["mean"]),
        std=tuple(expected["std"]),
        image_size=expected["input_size"][-1],
    )


def _glyph_vit(weights: str, seed: int) -> Loaded:
    own = weights == "pretrained"
    module = tiny.glyph_vit(pretrained=own, seed=seed)
    return Loaded(
        module=module.eval(),
        name=tiny.TAG if own else "glyph_vit",
        weights=weights,
        sha256=tiny.SHA256 if own else _fill(module, "glyph_vit", weights),
        mean=tiny.MEAN,
        std=tiny.STD,
        image_size=32,
    )


def _check_name(name: str) -> None:
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise _unknown(name, architecture, ["glyph_vit", *timm.list_models()])
    try:
        timm.get_pretrained_cfg(name, allow_unregistered=False)
    except RuntimeError:
        if tag:
            raise _unknown(name, name, timm.list_pretrained(f"{architecture}.*")) from None


def _unknown(name: str, nearly: str, known: Iterable[str]) -> ConfigurationError:
    close = get_close_matches(nearly, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "; timm.list_pretrained() lists the names"
    known_to = f"a name that timm {timm.__version__} knows"
    return ConfigurationError(f"backbone is {name!r}, expected glyph_vit or {known_to}{hint}")


def _made(name: str, pretrained: bool, seed: int) -> nn.Module:
    """timm draws from torch's global generator, which is given back as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if not pretrained:
            module: nn.Module = timm.create_model(name, num_classes=0)
            return module
        try:
            module = timm.create_model(name, num_classes=0, pretrained=True)
        except Exception as error:  # of a network, a cache or a hub
            raise DataError(
                f"the weights of {name} cannot be downloaded ({type(error).__name__}: "
                f"{_first_line(error)}); give them as a file (weights = its path: .safetensors, "
                f"{', '.join(_PICKLED)}), connect to the network, or choose weights = 'random'"
            ) from error
        return module


def _fill(module: nn.Module, name: str, weights: str) -> str:
    """Load the file that `weights` names, unless it is "random"; the sha256 of what is there."""
    if weights == "random":
        return _of_tensors(module)
    path = Path(weights).expanduser()
    if not path.is_file():
        raise DataError(
            f"there is no file {path}; weights are 'pretrained', 'random', or a file that exists"
        )
    content = path.read_bytes()
    found = _unwrapped(_read(path, content), path)
    own = module.state_dict()
    kept = {key: value for key, value in found.items() if key in own or not _classifies(key)}
    if misfits := _misfits(own, kept):
        raise DataError(
            f"{path} does not fit {name}: {'; '.join(misfits)}; give a file of {name}, or name the "
            "backbone that this file belongs to"
        )
    module.load_state_dict(kept)
    return hashlib.sha256(content).hexdigest()


def _read(path: Path, content: bytes) -> object:
    """Nothing in the file is executed."""
    kinds = (".safetensors", *_PICKLED)
    if path.suffix not in kinds:
        raise DataError(f"{path} ends in {path.suffix!r}; weights are read from {', '.join(kinds)}")
    try:
        if path.suffix == ".safetensors":
            return safetensors_load(content)
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files fail in many ways
        raise DataError(
            f"{path} cannot be read ({type(error).__name__}: {_first_line(error)}); it must hold "
            "plain tensors: save model.state_dict() anew, or fetch the file again"
        ) from error


def _unwrapped(state: object, path: Path) -> dict[str, Tensor]:
    """Tensors by name, out of {"state_dict": …} or {"model": …}, without a prefix "module."."""
    while isinstance(state, Mapping):
        inner = next((state[key] for key in _WRAPPERS if isinstance(state.get(key), Mapping)), None)
        if inner is None:
            break
        state = inner
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise DataError(
            f"{path} holds more than tensors by name; save model.state_dict() alone, or as "
            f"{' or '.join(repr(key) for key in _WRAPPERS)} of a dictionary"
        )
    return {str(key).removeprefix("module."): value for key, value in state.items()}


def _classifies(key: str) -> bool:
    return key.partition(".")[0] in _CLASSIFIERS


def _misfits(own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """What keeps a file from fitting, in words; the first few of each kind."""
    shapes = [
        f"{key} {list(found[key].shape)} instead of {list(own[key].shape)}"
        for key in own
        if key in found and found[key].shape != own[key].shape
    ]
    kinds = {
        "it lacks": [key for key in own if key not in found],
        "unknown are": sorted(found.keys() - own.keys()),
        "of another shape are": shapes,
    }
    return [f"{kind} {_first_few(keys)}" for kind, keys in kinds.items() if keys]


def _first_few(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "no reason given")


def _of_tensors(module: nn.Module) -> str:
    """sha256 of the names and bytes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for key, value in sorted(module.state_dict().items()):
        digest.update(key.encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
