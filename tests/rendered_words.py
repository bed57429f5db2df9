"""Words drawn at 256 x 256, and how many of them the OCR reward's reader reads: `python -m tests.rendered_words`.

A picture counts as read where the whole text read equals the word drawn, spaces and case ignored. Fonts are those
that come with PIL and matplotlib; text stands out from its ground by a contrast ratio of at least 3 (WCAG's bound
for large text), and lies wholly in the picture.
"""

import argparse
import random
import time
from pathlib import Path

import matplotlib
import numpy as np
from flowrl.rewards._detection.ocr_reader import engine
from flowrl.rewards.ocr import similarity
from PIL import Image, ImageDraw, ImageFont

SIZE, MARGIN, LEAST_CONTRAST = 256, 6, 3.0
FONTS = (
    None,  # PIL's own
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSansMono",
    "DejaVuSerif",
    "DejaVuSerif-BoldItalic",
    "STIXGeneral",
    "STIXGeneralBol",
    "cmss10",
)
FONT_SIZES = (20, 24, 28, 32, 40, 48, 64)
WORDS = """
anchor apple autumn bakery basket bridge butter candle carpet castle cherry circle coffee copper cotton dragon engine
family flower forest galaxy garden ginger guitar hammer harbor island jacket jungle kitchen ladder lemon library magnet
market meadow mirror monkey morning museum music needle number ocean office open orange paper pencil pepper picnic
planet pocket quiet rabbit rocket salad school silver spider station summer sugar ticket tomato travel tunnel valley
velvet violin walnut weather welcome window winter yellow zebra
"""


def _luminance(colour: tuple[int, ...]) -> float:
    linear = [v / 255 / 12.92 if v <= 10 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(first: tuple[int, ...], second: tuple[int, ...]) -> float:
    dark, light = sorted((_luminance(first), _luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def _font(name: str | None, size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    if name is None:
        return ImageFont.load_default(size)
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf", size)


def render(number: int) -> tuple[np.ndarray, str]:
    """Picture `number` of an endless list: [256, 256, 3] uint8 and the word, or two words, that it shows."""
    rng = random.Random(f"rendered words/{number}")
    text = " ".join(rng.sample(WORDS.split(), rng.choice((1, 1, 1, 2))))
    text = rng.choice((str.lower, str.title, str.upper))(text)
    while True:
        font = _font(FONTS[number % len(FONTS)], rng.choice(FONT_SIZES))
        left, top, right, bottom = font.getbbox(text)
        if right - left <= SIZE - 2 * MARGIN:
            break
    while True:
        ink, ground = (tuple(rng.randrange(256) for _ in range(3)) for _ in range(2))
        if _contrast(ink, ground) >= LEAST_CONTRAST:
            break
    picture = Image.new("RGB", (SIZE, SIZE), ground)
    x = rng.uniform(MARGIN, SIZE - MARGIN - (right - left)) - left
    y = rng.uniform(MARGIN, SIZE - MARGIN - (bottom - top)) - top
    ImageDraw.Draw(picture).text((x, y), text, fill=ink, font=font)
    return np.asarray(picture), text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--detection-side", type=int, nargs="+", default=[736, 384])
    options = parser.parse_args()
    drawn = [render(number) for number in range(options.count)]
    for side in options.detection_side:
        # Without the bound on confidence and the forgiven extra text: what is read must be the word.
        read, began = engine(0.0, side), time.process_time()
        values = [similarity(read(pixels), text, allow_extra_text=False) for pixels, text in drawn]
        cost = (time.process_time() - began) / options.count
        exact = sum(value == 1 for value in values) / options.count
        print(
            f"detection_side {side}: {exact:.1%} of {options.count} read exactly, mean similarity "
            f"{sum(values) / options.count:.4f}, {cost:.2f} s of one core a picture"
        )
        for value, (_, text) in zip(values, drawn, strict=True):
            if value < 1:
                print(f"  {text!r}: {value:.2f}")


if __name__ == "__main__":
    main()
