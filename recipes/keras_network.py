"""A Keras model for the built-in digits, as `recipes/keras.toml` names it."""

import keras


def network() -> keras.Model:
    """Two dense layers."""
    return keras.Sequential(
        [
            keras.Input((1, 8, 8)),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
