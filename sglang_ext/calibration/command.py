"""The subcommand ``calibrate`` of ``sglang-ext``."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ext.console import BAD_INPUT, FAILED, OK, complain

if TYPE_CHECKING:
    from sglang_ext.calibration.measure import Measured

__all__ = ["add_calibrate"]


def add_calibrate(commands: Any) -> None:
    """Add the subcommand to argparse's ``commands``."""
    parser = commands.add_parser(
        "calibrate", help="find the FP8 scales of a model, and what FP8 pages cost in quality"
    )
    parser.add_argument("--model-path", type=Path, required=True, help="a folder with the weights")
    parser.add_argument("--out", type=Path, required=True, help="the scales file to write")
    parser.add_argument("--text", type=Path, help="UTF-8 text like that served; default: English")
    parser.add_argument("--tokens", type=int, default=8_192, help="of the text, half as a test")
    parser.add_argument("--format", choices=("fp8_e4m3", "fp8_e5m2"), help="default: the better")
    parser.set_defaults(run=_calibrate)


def _calibrate(options: argparse.Namespace) -> int:
    # Loads torch and transformers, which the other commands do not need.
    from sglang_ext.calibration.measure import calibrate, default_text
    from sglang_ext.tiering.quantizer import FORMATS
    from sglang_ext.tiering.scales import save_scales

    if not options.out.parent.is_dir():
        return complain(f"{options.out}: there is no folder {options.out.parent}", BAD_INPUT)
    if not options.model_path.is_dir():
        return complain(f"{options.model_path}: not a folder with a model", BAD_INPUT)
    try:
        text = options.text.read_text(encoding="utf-8") if options.text else default_text()
    except (OSError, UnicodeDecodeError) as error:
        return complain(f"{options.text}: {error}", BAD_INPUT)
    try:
        measured = calibrate(
            options.model_path, text, tokens=options.tokens, format=FORMATS.get(options.format)
        )
        save_scales(options.out, measured.scales)
    except OSError as error:
        return complain(str(error), FAILED)
    _show(measured, options.out)
    return OK


def _show(measured: "Measured", out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(
        *("format", "scheme", "loss", "95 % interval", "moved, nats"),
        title="Perplexity over that of bf16 pages, and how far the predictions move",
    )
    for loss in measured.losses:
        interval = f"{loss.low:+.2f} to {loss.high:+.2f} %"
        moved = f"{loss.divergence:.5f}"
        table.add_row(loss.format.name, loss.scheme.name, f"{loss.percent:+.2f} %", interval, moved)
    console.print(table)
    layers = Table("layer", "K", "V", title="Error of each layer, over its own size")
    for layer, (of_keys, of_values) in measured.layer_errors.items():
        layers.add_row(str(layer), f"{of_keys:.2%}", f"{of_values:.2%}")
    console.print(layers)
    chosen = measured.chosen
    console.print(
        f"Measured on {measured.tokens} tokens, half of them not used for the scales.\n"
        f"Recommended: {chosen.format.name}, {chosen.scheme.name}. Written to {out}."
    )
