"""Encoded images -> pixels."""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from cache_client.batches import convert
from cache_client.batches import images as batches_images
from cache_client.reading import rows as reading_rows
from cache_protocol.errors import ConfigError, InvalidImageError
from cache_protocol.storage.layout import Layout

Image = pytest.importorskip("PIL.Image")


def encoded(pixels: np.ndarray[Any, Any], kind: str = "png", mode: str | None = None) -> bytes:
    file = io.BytesIO()
    image = Image.fromarray(pixels)
    (image if mode is None else image.convert(mode)).save(file, kind)
    return file.getvalue()


PIXELS = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)


def test_images_of_one_size_are_stacked_in_either_order_of_axes() -> None:
    values = pa.array([encoded(PIXELS), encoded(PIXELS + 9)], pa.binary())
    first = batches_images.ImageDecoder("image", "rgb", channels_first=True)(values)
    last = batches_images.ImageDecoder("image", "rgb", channels_first=False)(values)
    assert isinstance(first, np.ndarray) and isinstance(last, np.ndarray)
    assert first.shape == (2, 3, 2, 3) and last.shape == (2, 2, 3, 3)
    assert (last[1] == PIXELS + 9).all() and (first == last.transpose(0, 3, 1, 2)).all()
    gray = batches_images.ImageDecoder("image", "gray", channels_first=True)(values)
    assert isinstance(gray, np.ndarray) and gray.shape == (2, 1, 2, 3)


def test_unchanged_images_have_the_channels_of_their_file() -> None:
    flat = PIXELS[:, :, 0]
    palette = Image.fromarray(PIXELS).convert("P", palette=Image.Palette.ADAPTIVE)
    file = io.BytesIO()
    palette.save(file, "png")
    alpha = np.concatenate([PIXELS, PIXELS[:, :, :1]], 2)
    files = [
        encoded(flat),
        encoded(PIXELS),
        encoded(alpha),
        file.getvalue(),
        encoded(flat, mode="1"),
    ]
    images = batches_images.ImageDecoder("i", "unchanged", channels_first=False)(
        pa.array(files, pa.large_binary())
    )
    assert [image.shape[2] for image in images if image is not None] == [1, 3, 4, 3, 1]
    assert images[2] is not None and (images[2] == alpha).all()


def test_a_null_is_none_and_makes_a_list() -> None:
    values = pa.array([encoded(PIXELS), None], pa.binary())
    images = batches_images.ImageDecoder("image", "rgb", channels_first=False)(values)
    assert isinstance(images, list) and images[1] is None and images[0] is not None
    assert batches_images.ImageDecoder("image", "rgb", channels_first=False)(values[:0]) == []


def test_bad_bytes_are_named_by_column_row_and_reason() -> None:
    good = encoded(PIXELS)
    deep = encoded(np.arange(6, dtype=np.uint16).reshape(2, 3))
    cases = [
        (b"not an image", "cannot identify"),
        (good[: len(good) // 2], "."),
        (b"", "."),
        (deep, "I;16"),
    ]
    for bad, reason in cases:
        values = pa.array([good, bad], pa.binary())
        with pytest.raises(InvalidImageError, match=rf"column 'photo' .* row 1 .*{reason}"):
            batches_images.ImageDecoder("photo", "rgb", channels_first=False)(values)


def test_torchvision_decodes_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in: the wheel of torchvision on the index needs CUDA."""
    asked: list[object] = []

    def decode_image(data: torch.Tensor, mode: object) -> torch.Tensor:
        asked.append(mode)
        pixels = np.array(Image.open(io.BytesIO(data.numpy().tobytes())))
        return torch.from_numpy(pixels).permute(2, 0, 1)

    module = ModuleType("torchvision")
    modes = {"RGB": "RGB", "GRAY": "GRAY", "UNCHANGED": "UNCHANGED"}
    module.io = SimpleNamespace(decode_image=decode_image, ImageReadMode=modes)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", module)
    images = batches_images.ImageDecoder("image", "rgb", channels_first=False)(
        pa.array([encoded(PIXELS)], pa.binary())
    )
    assert (np.asarray(images)[0] == PIXELS).all() and asked == ["RGB"]
    with pytest.raises(InvalidImageError, match="row 0 of the batch"):
        batches_images.ImageDecoder("image", "gray", channels_first=False)(
            pa.array([b"?"], pa.binary())
        )


def test_a_batch_has_tensors_for_torch_and_arrays_for_numpy() -> None:
    schema = pa.schema([("n", pa.int64()), ("image", pa.binary())])
    layout = Layout(schema)
    values = pa.array([encoded(PIXELS), encoded(PIXELS)], pa.binary())
    place = {name: layout.place(name)[0] for name in schema.names}
    rows = reading_rows.Rows(
        layout, {place["n"]: np.arange(2).reshape(2, 1)}, {place["image"]: values}, 2
    )
    batch = convert.Converter(layout, decode={"image": "rgb"})(rows)
    assert batch["image"].shape == (2, 3, 2, 3) and batch["image"].dtype == torch.uint8
    assert list(batch) == ["n", "image"]
    assert (
        convert.Converter(layout, None, "numpy", decode={"image": "gray"})(rows)["image"].shape[-1]
        == 1
    )


def test_bad_arguments_are_quoted() -> None:
    assert batches_images.decode_problems(None, "arrow") == []
    assert "batch_format='polars'" in batches_images.decode_problems({"image": "rgb"}, "polars")[0]
    assert "'cmyk'" in batches_images.decode_problems({"image": "cmyk"}, "torch")[0]
    layout = Layout(pa.schema([("n", pa.int64())]))
    with pytest.raises(ConfigError, match="'n' is a int64, and images are binary"):
        convert.Converter(layout, decode={"n": "rgb"})
    with pytest.raises(ConfigError, match="no column 'x'"):
        convert.Converter(layout, decode={"x": "rgb"})
