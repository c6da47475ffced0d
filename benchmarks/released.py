"""Images a second of the released prompt learners' own training loop, without data loading.

    PYTHONPATH=<timm 0.6.12>:<checkout of the ARC release> python benchmarks/released.py OUT.json

The loop is theirs (`_init_train`), fp32 as they run it, in their second task; only the loader is a
list of random batches that lie on the GPU, and the weights are random. `arc-cl bench training
--released OUT.json`, right after it on the same machine, states ours as a multiple.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

import torch

LEARNERS = ("l2p", "dualprompt", "coda_prompt")
STEPS = 30


def main() -> None:
    device = torch.device("cuda:0")
    speeds = {name: images_per_second(name, device) for name in LEARNERS}
    whole = {"images/s": speeds, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    Path(sys.argv[1]).write_text(json.dumps(whole, indent=1) + "\n")
    print(whole)


def images_per_second(name: str, device: torch.device) -> float:
    module = importlib.import_module(f"models.{name}")
    checkout = Path(module.__file__).parent.parent
    args = json.loads((checkout / "exps" / f"{name}.json").read_text())
    args.update(pretrained=False, nb_classes=100, nb_tasks=10, tuned_epoch=1, device=[device])
    learner = module.Learner(args)
    learner._network.to(device)
    learner._cur_task, learner._known_classes, learner._total_classes = 1, 10, 20
    if name == "coda_prompt":
        learner.data_weighting()
    optimizer = learner.get_optimizer()
    size = args["batch_size"]
    batch = (None, torch.rand(size, 3, 224, 224, device=device), torch.arange(size) % 10 + 10)
    batch = (batch[0], batch[1], batch[2].to(device))
    learner._init_train([batch] * 5, None, optimizer, None)
    torch.cuda.synchronize()
    began = time.perf_counter()
    learner._init_train([batch] * STEPS, None, optimizer, None)
    torch.cuda.synchronize()
    return STEPS * size / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
