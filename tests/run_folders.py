"""Run folders as the trainers leave them, of networks that no trainer has seen."""

from ea_vision.engine import run_folder


def write_run(folder, name, model, kwargs, config=None, **about):
    """Write the run folder of a network that has this name and these keywords; return it.

    config: the trainer's options, by default of a run on digits.
    """
    folder.mkdir(parents=True)
    config = {"model": name, "dataset": "digits"} if config is None else config
    run_folder.write_config(folder, config, {"model_kwargs": kwargs, **about})
    run_folder.write_weights(folder, model.state_dict())
    return folder
