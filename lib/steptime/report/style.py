"""How figures look: colours, marks and line styles that mean the same everywhere, and files that are byte-stable.

Every colour has a light and a dark value. Figures are drawn with the light ones on white paper; the report replaces
them by CSS variables when it puts a figure into a page, so that the same figure is readable in both.
"""

import io
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import seaborn as sns
from matplotlib.figure import Figure

from steptime.core.errors import InputError
from steptime.core.files import write_text

THEME: dict[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#16191d"),
    "ink": ("#1f2429", "#e4e2dc"),
    "muted": ("#5b646e", "#a3abb4"),
    "grid": ("#dfe3e7", "#323940"),
    # frameworks: Okabe & Ito's colour-blind safe set, lightness adjusted to read as text on either paper
    "torch": ("#c24e00", "#f0884a"),
    "tensorflow": ("#0069a8", "#5cb3e8"),
    "jax": ("#00805b", "#3fc49a"),
    "caffe": ("#a8487f", "#dd8fbb"),
    "cntk": ("#8a6a00", "#d9b436"),
    "mxnet": ("#4d4fa3", "#a3a5f0"),
    "keras": ("#b3202a", "#f07a80"),
    "chainer": ("#6b7a00", "#b3c43a"),
    "theano": ("#007a8a", "#45c0d0"),
    "onnxruntime": ("#5f5f66", "#b5b5bc"),
    "h2o": ("#7a5230", "#c99a6c"),
    # phases of a step: hue by resource, lightness by order, so that they differ in grey too
    "io": ("#b98a1a", "#d8ad45"),
    "h2d": ("#e3c572", "#8f7534"),
    "forward": ("#7cc0b4", "#7cc0b4"),
    "backward": ("#1f7a70", "#2f8f84"),
    "comm": ("#93407c", "#c277ab"),
    "update": ("#8b939b", "#78818a"),
    # kinds of layers
    "kind_convolution": ("#2f6db3", "#6ea8e6"),
    "kind_dense": ("#b5651d", "#e09a58"),
    "kind_sequence": ("#8c5bb0", "#bb95dc"),
    "kind_normalisation": ("#3f8f4f", "#71c482"),
    "kind_pooling": ("#9a8200", "#cdb83f"),
    "kind_elementwise": ("#c0507a", "#e58bab"),
    "kind_moving": ("#4c8c96", "#80c3cd"),
    "kind_outside": ("#828a92", "#737c85"),
    # schedules
    "end_of_backward": ("#76808a", "#9aa4ae"),
    "wait_free": ("#2a8074", "#56b8aa"),
    "merged": ("#7b3f9d", "#bd8fdc"),
    "buckets": ("#8f6b2e", "#d1a95c"),
    "ps_central": ("#b0303f", "#ea7f88"),
    "ps_sharded": ("#c9662a", "#eb9a62"),
    "sufficient_factors": ("#3566a8", "#7da9e3"),
    "lazy": ("#a3477a", "#e08fbc"),
    "sparse": ("#55803a", "#9cc97e"),
    "hierarchical": ("#5b5f9e", "#a4a8e6"),
    "local_sgd": ("#8a5a5a", "#cda0a0"),
}
"""Name -> (light, dark)."""

KINDS: dict[str, dict[str, Any]] = {
    "measured": {"marker": "o", "linestyle": "-", "is_filled": True},
    "emulated": {"marker": "D", "linestyle": "-.", "is_filled": True},
    "modelled": {"marker": "o", "linestyle": "--", "is_filled": False},
    "simulated": {"marker": "s", "linestyle": ":", "is_filled": False},
}
"""How a number was got -> its mark. Filled: something ran. Open: a formula or a simulator says so."""

_RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "steptime",
    "font.family": "sans-serif",
    # matplotlib's own font decides the layout, so that it is the same on every machine
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "figure.figsize": (4.8, 3.0),
    "figure.constrained_layout.use": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "axes.labelsize": 10,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.7,
    "lines.markersize": 5.5,
    "patch.linewidth": 0.8,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "xtick.major.width": 0.8,
    "ytick.major.width": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def colour(name: str) -> str:
    """The light value of a named colour; a setting has its framework's, one that has none is drawn in ink."""
    framework = re.match("[a-z]*", name)
    return THEME.get(name, THEME.get(framework.group() if framework else "", THEME["ink"]))[0]


def mark(kind: str, of: str) -> dict[str, Any]:
    """Keyword arguments for `Axes.plot` that say how a number was got. Raises InputError for an unknown kind."""
    if kind not in KINDS:
        raise InputError(f"figure: kind = {kind!r}: is unknown; use one of {', '.join(KINDS)}")
    own = KINDS[kind]
    shade = colour(of)
    return {
        "marker": own["marker"],
        "linestyle": own["linestyle"],
        "color": shade,
        "markerfacecolor": shade if own["is_filled"] else colour("paper"),
        "markeredgecolor": shade,
        "markeredgewidth": 1.4,
    }


def use() -> None:
    """Set the style for the whole process; in a notebook, show figures as SVG with text."""
    paper, ink, muted, grid = (colour(name) for name in ("paper", "ink", "muted", "grid"))
    inks: dict[Any, Any] = {
        "figure.facecolor": paper,
        "axes.facecolor": paper,
        "savefig.facecolor": paper,
        "text.color": ink,
        "axes.titlecolor": ink,
        "axes.labelcolor": muted,
        "axes.edgecolor": muted,
        "xtick.color": muted,
        "ytick.color": muted,
        "grid.color": grid,
    }
    sns.set_theme(style="ticks", palette=[colour(name) for name in ("torch", "tensorflow", "jax", "caffe", "cntk")])
    mpl.rcParams.update(_RC | inks)
    shell = sys.modules.get("IPython")
    if shell is not None and shell.get_ipython() is not None:
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("svg", metadata={"Date": None, "Creator": None}, bbox_inches=None)


def svg_text(figure: Figure) -> str:
    """The figure as SVG: no date, no version, ids from a fixed salt."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def save(figure: Figure, path: Path) -> None:
    """Write `figure` to an .svg file, byte-stable. Raises InputError for another file type."""
    if Path(path).suffix != ".svg":
        raise InputError(f"{path}: figures are saved as SVG; end the name with .svg")
    write_text(path, svg_text(figure))
