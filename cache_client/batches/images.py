"""Encoded images -> pixels, by torchvision where it is installed, else by Pillow."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cache_protocol.errors import ConfigError, InvalidImageError

ImageMode = Literal["rgb", "gray", "unchanged"]
IMAGE_MODES: Final[tuple[ImageMode, ...]] = get_args(ImageMode)

Pixels = npt.NDArray[np.uint8]
_Decode = Callable[[pa.Buffer], Pixels]  # -> [height, width, channels]


class ImageDecoder:
    """Decodes one column of encoded images. Any thread.

    Args:
        column: its name, for errors.
        mode: ``rgb`` has 3 channels, ``gray`` 1, ``unchanged`` those of the file.
        channels_first: images are ``[C, H, W]`` instead of ``[H, W, C]``.

    Raises:
        ConfigError: neither torchvision nor Pillow is installed.
    """

    def __init__(self, column: str, mode: ImageMode, *, channels_first: bool) -> None:
        self._column = column
        self._channels_first = channels_first
        self._decode = _find_decoder(mode)

    def __call__(self, values: pa.Array) -> Pixels | list[Pixels | None]:
        """The images of a binary column.

        Returns:
            One array ``[B, C, H, W]`` or ``[B, H, W, C]`` if all images have one shape and none is
            null. Else a list of arrays, with None for nulls.

        Raises:
            InvalidImageError: names the column, the row of the batch and the reason.
        """
        images = [self._image(row, value) for row, value in enumerate(values)]
        shapes = {None if image is None else image.shape for image in images}
        if len(shapes) != 1 or None in shapes:
            return images
        return np.stack([image for image in images if image is not None])

    def _image(self, row: int, value: pa.Scalar) -> Pixels | None:
        if not value.is_valid:
            return None
        encoded = value.as_buffer()
        try:
            pixels = self._decode(encoded)
            if pixels.dtype != np.uint8:
                raise ValueError(f"it has {pixels.dtype} instead of 8 bits a channel")
        except Exception as error:  # the decoders raise many kinds
            start = encoded.to_pybytes()[:16]
            raise InvalidImageError(
                f"column {self._column!r} holds no image that can be read in row {row} of the "
                f"batch: {str(error).splitlines()[0] if str(error) else type(error).__name__} "
                f"({encoded.size:,} bytes, which begin with {start!r})"
            ) from error
        return np.ascontiguousarray(pixels.transpose(2, 0, 1)) if self._channels_first else pixels


def _find_decoder(mode: ImageMode) -> _Decode:
    try:
        from torchvision import io as torchvision_io
    except ModuleNotFoundError:
        return _pillow_decoder(mode)
    modes = {"rgb": "RGB", "gray": "GRAY", "unchanged": "UNCHANGED"}
    wanted = torchvision_io.ImageReadMode[modes[mode]]

    def decode(encoded: pa.Buffer) -> Pixels:
        import torch

        writable = np.frombuffer(encoded, np.uint8).copy()
        pixels: Pixels = torchvision_io.decode_image(torch.from_numpy(writable), wanted).numpy()
        return pixels.transpose(1, 2, 0)

    return decode


def _pillow_decoder(mode: ImageMode) -> _Decode:
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise ConfigError(
            "decode needs the package torchvision or Pillow: pip install pillow"
        ) from None

    def decode(encoded: pa.Buffer) -> Pixels:
        with Image.open(io.BytesIO(encoded)) as image:
            if image.mode[0] in "IF":
                raise ValueError(f"it has mode {image.mode} instead of 8 bits a channel")
            found: Any = image.convert({"rgb": "RGB", "gray": "L"}.get(mode) or _mode(image))
            pixels: Pixels = np.array(found)
        return pixels[:, :, None] if pixels.ndim == 2 else pixels

    return decode


def _mode(image: Any) -> str:
    """The mode with the channels of the file, as values of 8 bits."""
    if image.mode in ("L", "LA", "RGB", "RGBA"):
        return str(image.mode)
    if image.mode == "1":
        return "L"
    return "RGBA" if "transparency" in image.info or image.mode == "PA" else "RGB"


def decode_problems(decode: object, batch_format: object) -> list[str]:
    """The problems of the argument ``decode``, each quoted; empty if there is none."""
    if decode is None:
        return []
    if batch_format in ("arrow", "polars"):
        return [f"decode makes arrays: batch_format={batch_format!r} cannot have them"]
    good = isinstance(decode, dict) and all(
        isinstance(name, str) and mode in IMAGE_MODES for name, mode in decode.items()
    )
    if good:
        return []
    return [f"decode must map columns to {', '.join(IMAGE_MODES)}, got {decode!r}"]
