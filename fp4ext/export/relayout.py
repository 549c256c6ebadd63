"""convert_checkpoint: a quantized checkpoint in another layout, with the bits it has."""

from __future__ import annotations

from pathlib import Path

from .checkpoint import Checkpoint
from .errors import Invalid
from .layout import Layout
from .saving import Report, save
from .writer import SHARD


def convert_checkpoint(
    source: str | Path,
    folder: str | Path,
    layout: str | Layout,
    *,
    requantize: bool = False,
    shard: int = SHARD,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Report:
    """Write a checkpoint in another layout: codes and block scales move as they are, and plain tensors stay plain.

    Args:
        source, folder, layout, requantize, shard, overwrite, progress: as in save.

    Returns:
        A Report; `lost` says of which weights the new layout could not keep the outer scale (or, with `requantize`, the
        format), and what became of it.

    Raises:
        Refused: a source in which nothing is quantized, or that the layout cannot hold; see save.
    """
    checkpoint = Checkpoint(source)
    if not any(map(checkpoint.format, checkpoint)) and not checkpoint.fp8:
        raise Invalid(f"{source}: nothing in it is quantized; accepted: a quantized checkpoint (save quantizes others)")
    report = save(
        checkpoint,
        folder,
        layout,
        filter=lambda name, shape: False,
        requantize=requantize,
        shard=shard,
        overwrite=overwrite,
        progress=progress,
    )
    report.left.clear()
    return report
