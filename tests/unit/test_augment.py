"""Layers that change images while a network trains, and pictures decoded out of a column of bytes."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.data import Pictures
from thinwire.errors import ConfigError, DataError
from thinwire.models import ChannelMean, Crop, Mirror, Shift

IMAGES = torch.arange(6 * 2 * 5 * 4, dtype=torch.float32).view(6, 2, 5, 4) + 1


def test_in_evaluation_nothing_is_random() -> None:
    layers = nn.Sequential(Shift(2), Mirror(), Crop((3, 2))).eval()
    assert torch.equal(layers(IMAGES), IMAGES[..., 1:4, 1:3])


def test_a_shift_moves_each_image_by_itself_and_fills_its_border() -> None:
    torch.manual_seed(0)
    layer, seen = Shift(1, fill=-1.0), set()
    for _ in range(40):
        for image, moved in zip(IMAGES, layer(IMAGES), strict=True):
            padded = nn.functional.pad(image, [1] * 4, value=-1.0)
            places = [(t, s) for t in range(3) for s in range(3) if torch.equal(padded[:, t : t + 5, s : s + 4], moved)]
            assert len(places) == 1
            seen.add(places[0])
    assert len(seen) == 9


def test_about_half_of_the_images_are_mirrored() -> None:
    torch.manual_seed(0)
    turned = 0
    for _ in range(50):
        for image, out in zip(IMAGES, Mirror()(IMAGES), strict=True):
            assert torch.equal(out, image) or torch.equal(out, image.flip(-1))
            turned += torch.equal(out, image.flip(-1))
    assert 110 < turned < 190


def test_a_random_crop_is_a_window_of_its_own_image() -> None:
    torch.manual_seed(0)
    out = Crop(3)(IMAGES)
    for image, window in zip(IMAGES, out, strict=True):
        assert any(torch.equal(image[:, t : t + 3, s : s + 3], window) for t in range(3) for s in range(2))


def test_a_channel_s_mean_and_spread_are_taken_out_and_are_saved_with_the_network() -> None:
    layer = ChannelMean([1.0, 2.0], [2.0, 4.0])
    assert torch.equal(layer(IMAGES)[:, 1], (IMAGES[:, 1] - 2) / 4)
    assert set(layer.state_dict()) == {"mean", "spread"}
    assert torch.equal(ChannelMean(IMAGES[0])(IMAGES)[0], torch.zeros_like(IMAGES[0]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Crop(0),
        lambda: Crop((2, -1)),
        lambda: Shift(-1),
        lambda: ChannelMean([1.0], [0.0]),
        lambda: ChannelMean(2.0),
    ],
)
def test_what_makes_no_layer_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


def test_images_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="larger than the images, 5 × 4"):
        Crop(6)(IMAGES)
    with pytest.raises(DataError, match="ChannelMean has 3 channels, the images have 2"):
        ChannelMean([1.0, 2.0, 3.0])(IMAGES)


Image = pytest.importorskip("PIL.Image")


def encoded(pixels: np.ndarray[Any, Any], kind: str = "PNG") -> bytes:
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, kind)
    return held.getvalue()


def random_pixels(high: int, wide: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (high, wide, 3)).astype(np.uint8)


def test_pictures_become_tensors_of_channels_first_from_0_to_1() -> None:
    pixels = [random_pixels(4, 3, seed) for seed in range(3)]
    found = Pictures("file")({"file": np.array([encoded(each) for each in pixels], object), "label": [1, 2, 3]})
    wanted = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255
    assert torch.equal(found["file"], wanted)
    assert found["label"] == [1, 2, 3]
    grey = Pictures("file", color=False)({"file": [encoded(pixels[0], "JPEG")]})["file"]
    assert grey.shape == (1, 1, 4, 3)


def test_pictures_of_several_sizes_are_resized_by_their_shorter_side_and_cropped() -> None:
    files = [encoded(random_pixels(20, 30)), encoded(random_pixels(50, 20))]
    assert Pictures("x", resize=(7, 9))({"x": files})["x"].shape == (2, 3, 7, 9)
    assert Pictures("x", resize=10, crop=(10, 8))({"x": files})["x"].shape == (2, 3, 10, 8)
    with pytest.raises(DataError, match=r"pictures of different sizes \(3×20×30, 3×50×20\).*resize"):
        Pictures("x")({"x": files})


@pytest.mark.parametrize(
    ("given", "said"),
    [(b"no picture", "picture 0 of a batch, cannot be read"), (encoded(random_pixels(4, 4)), "larger than")],
)
def test_what_is_no_picture_or_too_small_is_refused(given: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said):
        Pictures("x", crop=5)({"x": [given]})


@pytest.mark.parametrize("given", [0, -1, 2.5, (1, 2, 3), (1, 0), "10"])
def test_sizes_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"Pictures.resize = "):
        Pictures(resize=given)


def test_a_network_trains_on_a_column_of_jpegs_with_augmentation() -> None:
    """Dark pictures and bright ones, of several sizes."""
    chance = np.random.default_rng(0)
    labels = np.arange(80) % 2
    sizes = chance.integers(12, 20, (80, 2))
    pictures = [
        encoded((random_pixels(*size, seed) // 2 + 120 * label).astype(np.uint8), "JPEG")
        for seed, (size, label) in enumerate(zip(sizes.tolist(), labels, strict=True))
    ]

    def net() -> nn.Module:
        layers = [ChannelMean([0.5] * 3), Shift(1), Mirror(), Crop(8), nn.Flatten(), nn.Linear(192, 2)]
        return nn.Sequential(*layers)

    prepare = Pictures("image", resize=10, crop=10)
    assert pickle.loads(pickle.dumps(prepare)) == prepare
    result = tw.fit(
        net,
        {"image": np.array(pictures, object), "label": labels},
        inputs=["image"],
        transform=prepare,
        validation=0.2,
        strategy=tw.SparkNet(period=2),
        optimizer={"name": "sgd", "lr": 0.05},
        cluster=tw.Simulated(workers=2, step_s=0.01),
        epochs=6,
        batch_size=8,
    )
    assert result.summary["val_accuracy"] == 1.0
