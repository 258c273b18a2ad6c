"""A run that is in its folder already: its config, once it is trusted; and the same command again, which goes on."""

from __future__ import annotations

from omegaconf import OmegaConf

from trainrun.config import RunConfig
from trainrun.errors import ConfigError
from trainrun.rundir import RunDir, was_saved
from trainrun.trust import check_files, check_run
from trainrun.words.compose import leaves, load_config, plain_config, with_words

SHOWN = 3


def trusted_config(run: RunDir, overrides: list[str], trust: bool) -> RunConfig:
    """As `load_config`, of a folder that may be anybody's: code that it names must be known to be the user's."""
    path = run.config_that_holds
    found = plain_config(path)
    check_run(run, found, overrides, trust)
    return with_words(found, path, overrides)


def check_ours(run: RunDir) -> None:
    """Raises ConfigError where files lie in the place of a run's and no run made them: they are not ours to replace."""
    places = (
        run.config,
        run.overrides,
        run.environment,
        run.metrics,
        run.samples,
        run.status,
        run.log,
        run.report,
    )
    taken = [path.name for path in places if path.exists()]
    if taken and not run.identity.exists():
        remedy = "name another folder, or take them away"
        if was_saved(run):
            remedy = f"name another folder (ckpt_path={run.root} takes over a checkpoint)"
        raise ConfigError(
            f"hydra.run.dir={run.root}: holds {', '.join(taken)} and no {run.identity.name}, so no run made it; "
            + remedy
        )


def take_up(run: RunDir, config: RunConfig) -> None:
    """Raises ConfigError where the run in the folder is another than that of `config`; a seed that was drawn is kept.

    What the config names is on this command line, so nothing but the files of the folder can be a stranger's.
    """
    check_files(
        run.root, trust=False, way=f"trainrun resume {run.root} --trust"
    )  # a new run takes no such flag
    before = load_config(run.config_that_holds, [])
    if config.seed is None:
        config.seed = before.seed
    if changed := differences(before, config):
        raise ConfigError(
            f"hydra.run.dir={run.root}: holds a run already, which has {changed}; name another folder, or go on with "
            f"that run: trainrun resume {run.root} [key=value ...]"
        )
    take_back(run)


def differences(before: RunConfig, config: RunConfig) -> str:
    """`optimizer.lr=0.1 (here 0.2)`, the first few of them."""
    there, here = values_of(before), values_of(config)
    keys = [
        key for key in {**there, **here} if key not in there or key not in here or there[key] != here[key]
    ]
    shown = [f"{key}={there.get(key)} (here {here.get(key)})" for key in keys[:SHOWN]]
    return ", ".join(shown) + (f" and {len(keys) - SHOWN} other values" if len(keys) > SHOWN else "")


def values_of(config: RunConfig) -> dict[str, object]:
    return dict(leaves(OmegaConf.to_container(OmegaConf.structured(config))))


def take_back(run: RunDir) -> None:
    """The config before the words of a resume that never came to its first step."""
    if run.config_before.is_file():
        run.config_before.replace(run.config)
