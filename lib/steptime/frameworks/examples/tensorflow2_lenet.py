"""LeNet as TensorFlow's own quickstart for experts trains: a keras.Model, a gradient tape in a tf.function.

Written for comparison. Loaded by worker.py in place of an adapter, with the little of its contract that timing needs.
"""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import tensorflow as tf

CHANNELS_LAST = True
L = tf.keras.layers


class LeNet(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.conv1, self.pool1 = L.Conv2D(20, 5), L.MaxPooling2D(2)
        self.conv2, self.pool2 = L.Conv2D(50, 5), L.MaxPooling2D(2)
        self.flatten, self.dense1, self.dense2 = L.Flatten(), L.Dense(500, activation="relu"), L.Dense(10)

    def call(self, x):
        x = self.pool2(self.conv2(self.pool1(self.conv1(x))))
        return self.dense2(self.dense1(self.flatten(x)))


def versions():
    return {"framework": tf.__version__, "blas": "unknown"}


def build(network, weights, batch, threads, learning_rate, seed, device, dtype, mode):
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.random.set_seed(seed)
    return Trainer(learning_rate)


class Trainer(object):
    def __init__(self, learning_rate):
        self.model = LeNet()
        self.model(tf.zeros((1, 28, 28, 1)))
        self.loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.optimizer = tf.keras.optimizers.SGD(learning_rate)

    @tf.function
    def train_step(self, images, labels):
        with tf.GradientTape() as tape:
            loss = self.loss_object(labels, self.model(images, training=True))
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables))
        return loss

    def step(self, images, labels):
        return float(self.train_step(tf.convert_to_tensor(images), tf.convert_to_tensor(labels)))

    def shapes(self, images):
        return {}

    def parameter_count(self):
        return self.model.count_params()
