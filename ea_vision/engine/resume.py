"""Begin a run in its folder, or continue it from a checkpoint."""

import logging
import math
from dataclasses import asdict
from pathlib import Path

from ea_vision.base.errors import UsageError
from ea_vision.base.files import delete_leftovers
from ea_vision.base.processes import World
from ea_vision.engine import checkpoint, run_folder
from ea_vision.engine.config import TrainConfig
from ea_vision.engine.data_module import DataModule
from ea_vision.engine.step_log import StepLog
from ea_vision.engine.train import Trainer

log = logging.getLogger(__name__)


def is_complete(folder: Path, data: DataModule) -> bool:
    """Return whether --resume is auto and `folder` holds this run, complete.

    Raises:
        UsageError: the folder holds a run with other options or data, or of another release, or another program's
            config.yaml; or it holds a run and --resume is none.
    """
    config = data.config
    begun = (folder / run_folder.CONFIG).exists() or (folder / checkpoint.LAST).exists()
    if config.resume == "none" and begun:
        raise UsageError(
            f"{folder} holds a run: continue it with --resume auto, choose another --output, or "
            "delete it"
        )
    results = run_folder.read_results(folder)
    if results is None and not (folder / run_folder.CONFIG).exists():
        return False
    saved, about = run_folder.read_config(folder)
    if config.resume != "auto" or results is None:
        return False
    if config.test and "held_out_last" in results:  # all but the test is done
        return False
    _require_same(config.differences(saved, data.world.size, about["processes"]), folder)
    data.check_fingerprint(about["data_fingerprint"], folder)
    return results["epochs"] >= config.epochs


def _require_same(changed: dict[str, str], source: Path) -> None:
    if changed:
        raise UsageError(
            f"{source} holds a run with other options ({'; '.join(changed.values())}): choose "
            "another --output, or continue it with the new options by --resume PATH"
        )


def begin_or_resume(trainer: Trainer, about: dict) -> None:
    """Load the checkpoint that --resume names or finds, delete temporary files that are left, write config.yaml.

    Raises:
        UsageError: the checkpoint does not fit, or a log cannot be opened; the folder is unchanged.
    """
    config = trainer.config
    folder = trainer.folder
    world = trainer.world
    newest = checkpoint_to_resume(config, folder, world)
    branches_off = False
    if newest is not None:
        path, state = newest
        resume(trainer, path, state)
        is_own = path.parent == folder and _same_command(config, world, state)
        branches_off = config.resume != "auto" and not is_own
    trainer.progress.begin(about)
    if world.is_main:
        delete_leftovers(folder)
        trainer.step_log = StepLog(folder, config, trainer.progress.updates)
        for name in (run_folder.RESULTS, run_folder.CARD):  # only a complete run has them
            (folder / name).unlink(missing_ok=True)
        run_folder.write_config(
            folder, asdict(config), {**about, "starts": trainer.progress.starts}
        )
    if branches_off:
        choose_best_anew(trainer, path)
    world.barrier()


def checkpoint_to_resume(
    config: TrainConfig, folder: Path, world: World
) -> tuple[Path, dict] | None:
    """Return the path and state of the checkpoint that --resume names or finds.

    If the same command has begun a run from the named checkpoint before, that run continues from its own.

    Raises:
        UsageError: the named checkpoint cannot be read, or processes find different ones.
    """
    if config.resume == "none":
        return None
    named = config.resume != "auto"
    notices = world.is_main and not named
    with world.main_first():
        newest = checkpoint.newest_checkpoint(folder, log.warning if notices else None)
    if named and newest is not None and not _same_command(config, world, newest[1]):
        newest = None
    updates = world.gather(None if newest is None else newest[1]["progress"]["updates"])
    if len(set(updates)) > 1:
        raise UsageError(
            f"{folder} must be on a disk that all processes share: they find checkpoints after "
            f"updates {', '.join(map(str, updates))}"
        )
    if not named or newest is not None:
        return newest
    path = Path(config.resume)
    if not path.is_dir():
        return path, checkpoint.read_run_state(path)
    newest = checkpoint.newest_checkpoint(path)
    if newest is None:
        raise UsageError(f"--resume {path}: no valid checkpoint in this folder")
    return newest


def _same_command(config: TrainConfig, world: World, state: dict) -> bool:
    """Return whether a checkpoint's run has the same options, including --resume and --epochs."""
    saved = state["config"]
    same = config.resume == saved.get("resume") and config.epochs == saved["epochs"]
    return same and not config.differences(saved, world.size, state["world_size"])


def choose_best_anew(trainer: Trainer, path: Path) -> None:
    """Choose the best epoch of a run that continues from another run's checkpoint `path` among this checkpoint's and
    those that follow. All processes must call this."""
    progress = trainer.progress
    measured = math.nan
    if progress.rows and not progress.step:
        measured = progress.rows[-1][trainer.measures[0]]
    best = 0 if math.isnan(measured) else progress.epoch
    if progress.best_epoch not in (0, best):
        log.warning(
            "the weights of the best epoch so far, %d, stay beside %s: the best epoch is chosen anew",
            progress.best_epoch,
            path,
        )
    progress.best_epoch = best
    progress.best_top1 = measured if best else -1.0
    trainer.save(best=best > 0)


def resume(trainer: Trainer, path: Path, state: dict) -> None:
    """Continue from a checkpoint.

    Raises:
        UsageError: the checkpoint has other options (with --resume auto) or other data, or --epochs cannot be reached
            from it.
    """
    config = trainer.config
    changes = config.differences(state["config"], trainer.world.size, state["world_size"])
    if config.resume == "auto":
        _require_same(changes, path)
    order = [changes[name] for name in ("seed", "total_batch") if name in changes]
    if order and state["progress"]["step"]:
        raise UsageError(
            f"{path} lies inside an epoch, whose order this would change: {'; '.join(order)}"
        )
    for change in changes.values():
        log.warning("continuing with a changed option: %s", change)
    trainer.data.check_fingerprint(state["data_fingerprint"], path)
    trainer.load(state, path)
    progress = trainer.progress
    epochs = state["config"]["epochs"]
    if epochs < progress.epoch < epochs + 1 and config.epochs > epochs:
        raise UsageError(
            f"{path} stands at the end of a run of {epochs:g} epochs, inside an epoch, so "
            f"more cannot be added: epochs must be {epochs:g}, got {config.epochs:g}"
        )
    evaluated = not progress.rows or not math.isnan(progress.rows[-1][trainer.measures[0]])
    if progress.epoch >= trainer.total_epochs and not evaluated:
        raise UsageError(
            f"{path} stands after epoch {progress.epoch}, which --eval-epochs left out, so "
            f"--epochs must be more than {progress.epoch}, got {config.epochs}"
        )
    if epochs != config.epochs:
        log.warning(
            "epochs were %s, now %s: the learning rate follows the new length",
            epochs,
            config.epochs,
        )
    log.info("resumed from %s: epoch %d, update %d", path, progress.epoch, progress.updates)
