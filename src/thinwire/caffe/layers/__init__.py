"""Every type of layer, by its name in a prototxt."""

from thinwire.caffe.layers import dense, inputs, losses, neurons, norms, recurrent, shapes, vision
from thinwire.caffe.layers.base import REGISTRY, Layer, Shape, layer, make
from thinwire.caffe.layers.inputs import InputLayer

__all__ = [
    "REGISTRY",
    "InputLayer",
    "Layer",
    "Shape",
    "dense",
    "inputs",
    "layer",
    "losses",
    "make",
    "neurons",
    "norms",
    "recurrent",
    "shapes",
    "vision",
]
