"""The settings of one run; an exported program has them on top."""

from __future__ import annotations

from pathlib import Path

# ---- settings
MODEL = "mlp"  # mlp, cnn, resnet50, own
MODEL_ARGS = {"layers": [512], "activation": "relu", "dropout": 0.2}
INPUT_SHAPE = (784,)  # of one sample; images are (height, width, channels)
OUTPUTS = 10  # classes, or numbers to predict
TASK = "classification"  # or regression
X_SCALE = 1.0  # the stored inputs are divided by this
BATCH_SIZE = 128
EPOCHS = 5
OPTIMIZER = "adam"  # adam, adamw, sgd, rmsprop
OPTIMIZER_ARGS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
LEARNING_RATE = 0.001
SCHEDULE = "constant"  # or cosine: falls to 0 over the run
WARMUP_STEPS = 0  # steps in which the learning rate rises to its full value
SEED = 0  # of the weights, the order of the samples and dropout
ACCELERATOR = "tpu"  # tpu, or cpu: the same program on this computer's processor
DEVICE_INDEX = 0  # not used
PRECISION = "fp32"  # fp32, bf16
COMPILE = True  # not used: XLA always compiles
DETERMINISTIC = False  # not used: XLA gives the same bits each time on TPU and CPU
CUDNN_BENCHMARK = False  # not used
DATA_ON_DEVICE = True  # False: read batches from the files while training
DROP_LAST = False  # leave out the last, smaller batch of each epoch
VALIDATION = True
STRATEGY = "tpu"  # tpu, single
DEVICES = 1  # chips: each computes a part of every batch
NODES = 1  # machines
ACCUMULATE = 1  # parts in which a batch is computed, one after the other, to save memory
ACTIVATION_CHECKPOINTING = False  # not used
# ---- end of settings

HERE = Path(__file__).parent
