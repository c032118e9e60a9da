"""Training and evaluation, shared by the trainers.

    run             a run, put together: the one place where options, data, model and all below meet
    train_cifar     small images: options and data
    train_imagenet  images in class folders, tars or FFCV files: options and data
    config          options: defaults < recipe file < command line
    preflight       what can be checked before the first step: memory, disk, pace
    train           the training loop
    optimizer       the optimiser by name
    schedules       learning rate per update
    signals         SIGTERM and Ctrl-C as a wish to stop
    evaluate        top-1, top-5, confusion; every image exactly once
    report          what an evaluation leaves on disk
    checkpoint      one safetensors file with all that resuming needs, written atomically
    run_folder      what a run leaves on disk
    step_log        how a run goes between its epochs: speed.csv, TensorBoard, Weights & Biases
    curves          learning curves of several runs in one picture
    export          a complete run to a weights file with its card
"""
