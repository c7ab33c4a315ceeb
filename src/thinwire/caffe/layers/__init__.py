"""Every type of layer, by its name in a prototxt."""

from thinwire.caffe.layers import dense, inputs, losses, neurons, norms, recurrent, shapes, vision
from thinwire.caffe.layers.base import MAX_ELEMENTS, REGISTRY, Layer, Shape, layer, make
from thinwire.caffe.layers.inputs import InputLayer

__all__ = [
    "MAX_ELEMENTS",
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
