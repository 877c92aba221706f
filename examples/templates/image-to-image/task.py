"""Turn a picture into another one: remove noise from photographs. Replace data() and model()."""

from __future__ import annotations

from typing import Any

import numpy as np
from codec import LONGEST, Codec, to_png
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torch.nn import functional

HEIGHT, WIDTH = 32, 40  # pixels of the parts of photographs that the model trains with
NOISE = 30  # standard deviation, of 255


class Net(nn.Module):
    """Predicts the noise, and subtracts it. Replace: your network, such as a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 3, 3, padding=1),
        )  # fmt: skip

    def forward(self, image: Tensor) -> Tensor:
        clean: Tensor = image - self.layers(image)
        return clean


class Task:
    inputs = ("image",)  # columns of data() that the model takes, in order
    outputs = ("clean",)  # names for what it returns
    axes = {"image": ("batch", 3, "height", "width"), "clean": ("batch", 3, "height", "width")}
    longest = {"height": LONGEST, "width": LONGEST}

    def model(self) -> nn.Module:
        return Net()

    def data(self, split: str) -> dict[str, np.ndarray[Any, Any]]:
        # Replace: read pairs of pictures, the input of the model and what it should become.
        parts = np.concatenate([_parts(load_sample_image(name)) for name in ("china.jpg", "flower.jpg")])
        part = {"train": slice(0, 256), "validation": slice(256, 316), "test": slice(316, 416)}[split]
        clean = np.random.default_rng(0).permutation(parts)[part]
        noise = np.random.default_rng(list(split.encode())).normal(0, NOISE, clean.shape)
        noisy = (clean + noise).round().clip(0, 255)
        return {**Codec().pixels(noisy), "target": Codec().pixels(clean)["image"]}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.l1_loss(outputs, batch["target"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the peak signal-to-noise ratio in dB."""
        error = (outputs.clamp(0, 1) - batch["target"]).square().mean(dim=(1, 2, 3))
        return {"psnr": -10 * error.clamp(min=1e-10).log10()}

    # Optional: what the report shows of a sample.
    def show(self, batch: dict[str, Tensor], outputs: Tensor) -> list[dict[str, Any]]:
        rows = zip(batch["image"], outputs.clamp(0, 1), batch["target"], strict=True)
        return [{"input": image, "answer": answer, "target": target} for image, answer, target in rows]

    # Optional: the model that yours must beat.
    def baseline(self) -> Any:
        return lambda batch: functional.avg_pool2d(batch["image"], 3, stride=1, padding=1, count_include_pad=False)

    # Optional: test samples as a client would send them, and the answer in a prediction. With these two, the gate
    # compares the codec with the test data.
    def instances(self, batch: dict[str, Tensor]) -> list[Any]:
        pixels = (batch["image"] * 255).round().byte().permute(0, 2, 3, 1).numpy()
        return [to_png(picture) for picture in pixels]

    def answer(self, prediction: Any) -> Any:
        return Codec().decode([prediction])["image"][0]

    def predicted(self, outputs: Tensor) -> Tensor:
        return (outputs.clamp(0, 1) * 255).round() / 255  # as in a PNG

    # Optional: instances as a client would send them; they become golden requests.
    def example(self) -> list[Any]:
        return [to_png(load_sample_image("flower.jpg")[200:248, 200:264])]


def _parts(photo: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Cut a photograph into parts of equal size."""
    rows, columns = photo.shape[0] // HEIGHT, photo.shape[1] // WIDTH
    parts = photo[: rows * HEIGHT, : columns * WIDTH].reshape(rows, HEIGHT, columns, WIDTH, 3)
    return parts.swapaxes(1, 2).reshape(-1, HEIGHT, WIDTH, 3)
