"""Training and evaluation, shared by the trainers.

run             the command of a trainer, which puts options, data, model and all below together
resume          begin a run in its folder, or continue it from a checkpoint
evaluation      --evaluate: a run, a file of weights or a model by its name
data_module     what a trainer's file adds: options, data, loaders
train_cifar     small images: options and data
train_imagenet  images in class folders, tars or FFCV files: options and data
classification  what classifiers add: options, loss, evaluation
config          options: defaults < recipe file < command line
preflight       checks before the first step: memory, speed
train           the training loop
optimizer       the optimiser by name, and the learning rate of each update
muon            timm's Muon with one batch of matrices per shape
signals         SIGTERM and Ctrl-C as a request to stop
evaluate        top-1, top-5, confusion; every image exactly once
checkpoint      files with all that resuming needs, verified when they are read
run_folder      the files of a run
step_log        progress within an epoch: speed.csv, the log, TensorBoard, Weights & Biases
watch           attention maps during a run: entropy and largest probability by layer, and pictures
pictures        the confusion of an evaluation
"""
