"""All learners on one data setting, several seeds: a record of the runs, and a table.

    python results/learners.py --data glyphs --seeds 3 --jobs 2 --out results/learners-glyphs

Each run is `arc-cl train` in a process of its own with one thread, into a folder of its own under
`--runs`; runs that are there already are read, not made again. A_B and F are those of the plain
classifier, minutes are those of training alone. Writes OUT.json and OUT.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev

from arc_cl import catalogue
from arc_cl.protocol.record import Evaluation


def main() -> None:
    options = _options()
    wanted = [(name, seed) for name in options.learners for seed in range(options.seeds)]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda one: _run(options, *one), wanted))
    command = "python results/learners.py " + " ".join(sys.argv[1:])
    whole = {"command": command, "runs": rows}
    options.out.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
    table = _table(command, options.learners, rows)
    options.out.with_suffix(".md").write_text(table)
    print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="glyphs")
    parser.add_argument("--learners", nargs="+", default=list(catalogue.names("learners")))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--runs", type=Path, default=Path("runs/learners"))
    parser.add_argument("--out", type=Path, required=True, help="without an ending")
    return parser.parse_args()


def _run(options: argparse.Namespace, learner: str, seed: int) -> dict[str, object]:
    """One run, made or found: its numbers and where they come from."""
    folder = options.runs / f"{learner}-{options.data}-{seed}"
    words = ["train", "--learner", learner, "--data", options.data, "--devices", "cpu"]
    words += ["--seed", str(seed), "--out", str(folder)]
    if not list(folder.glob("evaluations/none-*.json")):
        subprocess.run(
            [sys.executable, "-c", "from arc_cl.cli import main; main()", *words],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        print(" ".join(words), file=sys.stderr, flush=True)
    path, *_ = sorted(folder.glob("evaluations/none-*.json"))  # streams differ, answers do not
    record = Evaluation.read(path)
    return {
        "learner": learner,
        "seed": seed,
        "A_B": record.metrics.average_accuracy,
        "F": record.metrics.forgetting,
        "minutes": _seconds(folder) / 60,
        "training": dict(record.training),
        "provenance": dict(record.provenance),
    }


def _seconds(folder: Path) -> float:
    lines = (folder / "events.jsonl").read_text().splitlines()
    ends = [each for each in map(json.loads, lines) if each["event"] == "stage ends"]
    return sum(each["seconds"] for each in ends)


def _table(command: str, learners: list[str], rows: list[dict]) -> str:
    base = {row["seed"]: row["A_B"] for row in rows if row["learner"] == "finetune"}
    lines = [
        "| learner | A_B % | over finetune | F % | minutes a run |",
        "|---|---|---|---|---|",
    ]
    for name in sorted(learners, key=lambda name: _mean(rows, name, "A_B")):
        mine = [row for row in rows if row["learner"] == name]
        gains = [row["A_B"] - base[row["seed"]] for row in mine if row["seed"] in base]
        gain = "" if name == "finetune" or not gains else _spread(gains, "+")
        cells = [
            name,
            _spread([row["A_B"] for row in mine]),
            gain,
            _spread([row["F"] for row in mine]),
            f"{mean(row['minutes'] for row in mine):.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    origin = rows[0]["provenance"]
    where = f"{origin['machine']}, torch {origin['torch']}, commit {origin['commit']}"
    seeds = len({row["seed"] for row in rows})
    return (
        "\n".join(lines) + f"\n\nMean ± standard deviation over {seeds} seeds; gains are paired by "
        f"seed. The plain classifier, no test-time method. One thread a run. Made by `{command}` "
        f"on {where}.\n"
    )


def _mean(rows: list[dict], name: str, what: str) -> float:
    return mean(row[what] for row in rows if row["learner"] == name)


def _spread(values: list[float], sign: str = "") -> str:
    middle, spread = 100 * mean(values), 100 * stdev(values) if len(values) > 1 else 0.0
    return f"{middle:{sign}.1f} ± {spread:.1f}"


if __name__ == "__main__":
    main()
