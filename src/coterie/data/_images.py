"""Reading folders of images into one array."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from coterie.data.archives import Bytes
from coterie.errors import DataError

ENDINGS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})


def image_files(folder: Path) -> list[Path]:
    """List the images of a folder in the order of their names."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in ENDINGS and path.is_file())


def read_image(path: Path, size: tuple[int, int] | None, channels: int) -> Bytes:
    """Read an image as ``[channels, height, width]``, brought to a size if one is given."""
    mode = "L" if channels == 1 else "RGB"
    target = None if size is None else (size[1], size[0])
    try:
        with Image.open(path) as image:
            image.load()
            if image.mode.startswith(("I", "F")):
                raise DataError(f"the image {path} has more than 8 bits a pixel ({image.mode}): make it 8-bit")
            pixels = image if image.mode == mode else image.convert(mode)
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise DataError(f"the image {path} cannot be read: {error}") from None
    if target is not None and pixels.size != target:
        pixels = pixels.resize(target, Image.Resampling.BILINEAR)
    content = np.asarray(pixels)
    return content[None] if channels == 1 else content.transpose(2, 0, 1)


def refuse_other_size(path: Path, image: Bytes, first: tuple[int, ...]) -> None:
    """Refuse an image that is not of the first one's size."""
    if image.shape != first:
        raise DataError(
            f"the image {path} is {image.shape[1]}x{image.shape[2]}, but the first one is {first[1]}x{first[2]}: give "
            "size=HEIGHTxWIDTH to bring all to one size"
        )


def read_images(paths: Sequence[Path], size: tuple[int, int] | None, channels: int) -> Bytes:
    """Read images into one array."""
    out: Bytes | None = None
    for number, path in enumerate(paths):
        image = read_image(path, size, channels)
        if out is None:
            out = np.empty((len(paths), *image.shape), dtype=np.uint8)
        refuse_other_size(path, image, out.shape[1:])
        out[number] = image
    if out is None:
        raise DataError("there are no images to read")
    return out
