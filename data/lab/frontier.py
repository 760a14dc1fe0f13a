"""What different skip patterns cost and save, trained, measured and drawn again:

    pip install matplotlib && python -m data.lab.frontier

Each oracle is the outcome of one short train_oracle.py command, which is printed. Those that are in
--out are not trained again and a cut run is resumed; after a change of the recipe, take another
--out. The figures (frontier.json) and the picture (frontier.svg) go there too.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

from data.checkpoint import read_oracle
from data.cli import Parser, command, show
from data.corpus import load_tokens
from data.files import replace_file
from data.lab.picture import load_pyplot
from eval_ppl import path_rows, prompt_rows
from load_weights import load_gpt2
from oracle import load_path

RUNS = {skip: f"--skip {skip}" for skip in (
    "5-6", "3-8", "2-9", "1-10", "1-4,6-9", "1-3,5-9", "1-3,5-6,8-10", "1-2,4-5,7-8,10-10")}
STEPS = 300                 # one short run each
ROOT = Path(__file__).parents[2]
COLUMNS = (("name", "oracle", "{}"), ("compute", "path compute", "{:.1%}"),
           ("bare_ratio", "no oracle", "{:.2f}"), ("ratio", "path ratio", "{:.3f}"),
           ("prefill_compute", "prefill compute", "{:.1%}"),
           ("prefill_ratio", "continuation ratio", "{:.3f}"), ("kept", "recall kept", "{:.1%}"))


def train(model, file, flags):
    """Runs train_oracle.py, or goes on with a run that was cut."""
    cut = Path(f"{file}.unfinished").exists()
    flags = ["--resume"] if cut else [*flags, "--steps", str(STEPS), "--model", model]
    arguments = ["train_oracle.py", *flags, "--out", str(file)]
    print("python", shlex.join(arguments), flush=True)
    if subprocess.run([sys.executable, ROOT / arguments[0], *arguments[1:]]).returncode:
        raise ValueError("this command failed or was cut: start again to go on")


def measure(name, file, gpt2, tokenizer):
    """One row of figures, on windows as in the oracle's training."""
    settings, path = read_oracle(file)[0], load_path(file, gpt2)
    ids = load_tokens(settings["text"], tokenizer, settings["context"])[1]
    ids = ids[:len(ids) // 4]                   # enough for a picture
    _, bare, jump = path_rows({name: path}, ids, settings["context"])
    prompt = {row["path"]: row for row in prompt_rows(path, ids, settings["context"])}
    prefill = prompt["oracle prefill"]
    return {"name": name, "compute": jump["compute"], "ratio": jump["ratio"],
            "bare_ratio": bare["ratio"], "prefill_compute": prefill["compute"],
            "prefill_ratio": prefill["ratio"], "kept": prefill["kept"]}


def label(axes, points):
    """Writes each name beside its point (x, y, name), as near as there is room."""
    taken = [(x - 8, y - 8, x + 8, y + 8)
             for x, y in axes.transData.transform([point[:2] for point in points])]
    if axes.get_legend():
        taken.append(axes.get_legend().get_window_extent().extents)
    frame = axes.get_window_extent().extents
    sides = [(dx * far, dy * far) for far in (1, 4, 7, 10)
             for dx, dy in ((6, 4), (6, -4), (-6, 4), (-6, -4), (0, 8), (0, -8))]
    for x, y, name in points:
        for dx, dy in sides:
            text = axes.annotate(name, (x, y), (dx, dy), textcoords="offset points", fontsize=8,
                                 ha="left" if dx > 0 else "right" if dx else "center",
                                 va="bottom" if dy > 0 else "top")
            left, low, right, high = text.get_window_extent().extents
            inside = frame[0] < left and frame[1] < low and right < frame[2] and high < frame[3]
            if inside and not any(left < b[2] and b[0] < right and low < b[3] and b[1] < high
                                  for b in taken) or (dx, dy) == sides[-1]:
                break
            text.remove()
        taken.append((left, low, right, high))
        if abs(dx) + abs(dy) > 10:
            axes.annotate("", (x, y), (dx, dy), textcoords="offset points",
                          arrowprops={"arrowstyle": "-", "lw": 0.5})


def draw(rows, file):
    """rows of frontier.json -> a picture: the path, the prefill's continuation, and its recall."""
    plt = load_pyplot()
    kinds = {"one span": ("o-", [row for row in rows if "," not in row["name"]]),
             "more spans": ("D", [row for row in rows if "," in row["name"]])}
    figure, panels = plt.subplots(1, 3, figsize=(13, 4.2))
    for axes, x, y, across, up, title in zip(
            panels, ("compute", "prefill_compute", "prefill_compute"),
            ("ratio", "prefill_ratio", "kept"), ("path", "prefill", "prefill"),
            ("perplexity ratio", "perplexity ratio", "kept, %"),
            ("Path throughout", "Oracle prefill, then the full model", "Recall behind that"),
            strict=True):
        scale, points = 100 if y == "kept" else 1, []
        for kind, (style, its) in kinds.items():
            its = sorted(((100 * row[x], scale * row[y], row["name"]) for row in its
                          if row[y] is not None), key=lambda point: point[0])
            axes.plot([point[0] for point in its], [point[1] for point in its], style, label=kind)
            points += its
        axes.set(xlabel=f"compute of the {across}, % of the full model's", ylabel=up, title=title)
        axes.margins(0.16)
        axes.grid(alpha=0.3)
        axes.autoscale_view()
        axes.points = points
    panels[0].legend(frameon=False)
    figure.tight_layout()
    for axes in panels:
        label(axes, axes.points)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="data/mini", help="a GPT-2 of 12 blocks (%(default)s)")
    add("--out", type=Path, default=Path("frontier"), help="directory (%(default)s)")
    args = parser.parse_args()
    load_pyplot()
    args.out.mkdir(parents=True, exist_ok=True)
    figures, (gpt2, tokenizer) = args.out / "frontier.json", load_gpt2(args.model)
    rows = json.loads(figures.read_text()) if figures.exists() else []
    rows = {row["name"]: row for row in rows if row["name"] in RUNS}
    for name, flags in RUNS.items():            # one after the other: a cut loses one at most
        file = args.out / f"{name}.safetensors"
        if not file.exists():
            train(args.model, file, flags.split())
            rows.pop(name, None)
        if name not in rows:
            rows[name] = measure(name, file, gpt2, tokenizer)
            replace_file(figures, json.dumps(list(rows.values()), indent=1).encode())
    rows = [rows[name] for name in RUNS]
    replace_file(figures, json.dumps(rows, indent=1).encode())
    show(rows, COLUMNS)
    draw(rows, args.out / "frontier.svg")


if __name__ == "__main__":
    command(main)
