"""Exports a perceptron and a convolutional network by Keras 3 and by tf2onnx.

    KERAS_BACKEND=tensorflow python tests/data/onnx/gen_keras.py   # keras, tensorflow-cpu, tf2onnx

It writes keras-mlp.onnx and keras-cnn.onnx, which `model.export(format="onnx")` makes, and
tf2onnx-mlp.onnx and tf2onnx-cnn.onnx, which `tf2onnx.convert.from_function` makes of the same
forward. `keras.safetensors` has their inputs and labels (`NAME/in/INPUT`), and the losses that
Keras has in 10 steps of SGD on them (`NAME/losses`): cross-entropy of the logits, learning rate 0.1.
"""

import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf
import tf2onnx
from keras import layers
from safetensors.numpy import save_file

HERE = Path(__file__).parent
OPSET = 18


def mlp():
    return keras.Sequential(
        [
            keras.Input((16,), batch_size=8, name="x"),
            layers.Dense(32, activation="relu", name="first"),
            layers.LayerNormalization(name="norm"),
            layers.Dense(5, name="last"),
        ]
    )


def cnn():
    return keras.Sequential(
        [
            keras.Input((10, 10, 3), batch_size=8, name="x"),
            layers.Conv2D(8, 3, activation="relu", name="first"),
            layers.MaxPooling2D(2, name="pool"),
            layers.Conv2D(16, 3, padding="same", activation="tanh", name="second"),
            layers.GlobalAveragePooling2D(name="mean"),
            layers.Dense(5, name="last"),
        ]
    )


def losses(model, x, labels, steps=10):
    """The losses of steps of SGD on one batch."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1)
    found = []
    for _ in range(steps):
        with tf.GradientTape() as tape:
            value = loss(labels, model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(value, variables), variables)
        found.append(float(value))
    return np.array(found, "f4")


def main():
    tensors = {}
    for name, make in (("mlp", mlp), ("cnn", cnn)):
        keras.utils.set_random_seed(len(name))
        model = make()
        random = np.random.default_rng(1)
        x = random.standard_normal(model.input_shape, dtype="f4")
        labels = random.integers(0, 5, 8)
        # The exporter folds biases that are zero into nothing.
        for weight in model.weights:
            weight.assign(weight + 0.1 * random.standard_normal(weight.shape, dtype="f4"))
        model(x)  # The exporter needs a model that was called.
        model.export(HERE / f"keras-{name}.onnx", format="onnx", verbose=False, opset_version=OPSET)
        spec = [tf.TensorSpec(model.input_shape, tf.float32, name="x")]
        forward = tf.function(lambda x, model=model: model(x, training=True))
        tf2onnx.convert.from_function(
            forward, spec, opset=OPSET, output_path=str(HERE / f"tf2onnx-{name}.onnx")
        )
        found = losses(model, x, labels)
        for kind in ("keras", "tf2onnx"):
            tensors[f"{kind}-{name}/in/x"] = x
            tensors[f"{kind}-{name}/in/labels"] = labels
            tensors[f"{kind}-{name}/losses"] = found
    save_file(tensors, HERE / "keras.safetensors")


if __name__ == "__main__":
    main()
