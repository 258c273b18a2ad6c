"""`python -m trainrun.race.racer_process FOLDER`: train one run of a race, as described by `request.json` in the
folder.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from trainrun.cli.main import report_crash, report_fault
from trainrun.config.compose import Composition, compose_run
from trainrun.config.schema import replace_values
from trainrun.errors import TrainrunError
from trainrun.folder.run_folder import LaunchSpec, list_typed_keys, read_json
from trainrun.runs.run import create_run, train_in_ranks
from trainrun.user_code import add_import_paths

REQUEST, JUDGED = "request.json", "judged.jsonl"
LOOP = "trainrun.race.judged_loop.JudgedLoop"


def main(argv: list[str]) -> int:
    """Return the exit code of the run."""
    folder = Path(argv[0])
    request = read_json(folder / REQUEST)
    words = list(request["words"])
    folders = [word.partition("=")[2] for word in words if word.startswith("--config-dir=")]
    paths = add_import_paths([str(Path(name).resolve().parent) for name in folders])
    try:
        composition = compose_run(words)
        config = replace_values(
            composition.config, {"seed": request["seed"], "monitor.plots": False, "checkpoint.mirror": None}
        )
        judge = {"_target_": LOOP, "file": str(folder / JUDGED), **request["judge"]}
        config = replace(config, loop=judge, typed=list_typed_keys(composition.overrides))
        place = {"hydra.run.dir": str(folder)}
        run = create_run(Composition(config, {}, composition.overrides, place), words)
        return train_in_ranks(run, config, LaunchSpec(resume=False, paths=paths))
    except TrainrunError as error:
        return report_fault(error)
    except Exception as error:
        return report_crash(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
