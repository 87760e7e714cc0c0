"""Read images as datasets of the Hugging Face Hub have them: structs of bytes and a path.

Starts a cache on this machine, writes such a table, and decodes its images to pixels, without SQL.
It needs torchvision or Pillow:

    python examples/hub_images.py
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from cache_client import CacheClient, CacheIterableDataset, DatasetSpec
from cache_server import LocalCluster

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def main() -> None:
    """Runs the example."""
    with tempfile.TemporaryDirectory() as directory, LocalCluster(nodes=1) as cluster:
        path = Path(directory) / "train-00000-of-00001.parquet"
        write_images(path)
        CacheClient(cluster.endpoint).load(DatasetSpec("digits", path))
        digits = CacheIterableDataset(
            "digits",
            cache=cluster.endpoint,
            batch_size=50,
            shuffle=True,
            columns=["image.bytes", "label"],
            decode={"image.bytes": "gray"},
        )
        for batch in digits.loader():
            pixels, labels = batch["image"]["bytes"], batch["label"]
        print(f"{len(digits)} batches: {tuple(pixels.shape)} {pixels.dtype}, labels {labels.dtype}")


def write_images(path: Path) -> None:
    """200 images of 28 x 28 pixels, as PNG."""
    rng = np.random.default_rng(0)
    images = []
    for number in range(200):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (28, 28), np.uint8)).save(file, "PNG")
        images.append({"bytes": file.getvalue(), "path": f"{number}.png"})
    labels = pa.array(rng.integers(0, 10, 200))
    pq.write_table(pa.table({"image": pa.array(images, IMAGE), "label": labels}), path)


if __name__ == "__main__":
    main()
