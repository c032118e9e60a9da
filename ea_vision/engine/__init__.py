"""Training and evaluation shared by the trainers: nothing here knows a particular model or data set.

    config        options: defaults < recipe file < command line
    distributed   ranks, devices, sums over ranks
    build         models by name, optimisers, with errors that help
    schedules     learning rate per update
    train         the training loop
    evaluate      top-1, top-5, confusion; every image exactly once
    checkpoint    one safetensors file with all that resuming needs, written atomically
    run_folder    what a run leaves on disk
    curves        learning curves of several runs in one picture
    sweep         one run per setting, and the curve over the settings
"""
