"""Training and evaluation, shared by the trainers.

command         the command of a trainer: the one place where options, data, model and all below meet
data_module     what a trainer's file adds: options, data, loaders
train_cifar     small images: options and data
train_imagenet  images in class folders, tars or FFCV files: options and data
classification  what classifiers add: options, loss, evaluation
config          options: defaults < recipe file < command line
preflight       what can be checked before the first step: memory, pace
train           the training loop
optimizer       the optimiser by name, and the learning rate of each update
muon            timm's Muon with one batch of matrices per shape
signals         SIGTERM and Ctrl-C as a wish to stop
evaluate        top-1, top-5, confusion; every image exactly once
checkpoint      files with all that resuming needs, verified when they are read
run_folder      what a run leaves on disk
step_log        how a run goes between its epochs: speed.csv, the log, TensorBoard, Weights & Biases
watch           attention maps after each epoch: entropy and largest probability by layer
pictures        learning curves of several runs, and the confusion of an evaluation
"""
