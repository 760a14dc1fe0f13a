"""The README's ladder and frontier, trained, measured and drawn again:  pip install matplotlib && python -m data.frontier

Each oracle is the outcome of one train_oracle.py command, which is printed. Those that are already in --out are not trained
again, so a run that was cut goes on; after a change of the recipe, take another --out. The figures (frontier.json) and the
picture (frontier.svg) go there too.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

from data.cli import Parser, command, show
from data.corpus import load_tokens
from data.cost import flops
from data.files import replace_file
from eval_ppl import evaluate
from load_weights import load_gpt2
from oracle import load_path, plain_skip, read_settings

LADDER = {"one least-squares matrix": "--oracle linear", "mlp": "--oracle mlp --dim 236", "transformer": "",
          "transformer, seed 1": "--seed 1", "transformer, seed 2": "--seed 2",
          "transformer, long run": "--dim 64 --blocks 2 --batch-size 1 --lr 0.015 --steps 40000 --kl-weight 1"}
SHORT = " --steps 500"     # the frontier compares oracles of one short run each
SIZES = {f"dim {dim}": f"--dim {dim}" + SHORT for dim in (40, 84, 168)}
SKIPS = {f"skip {skip}": f"--skip {skip} --dim 84" + SHORT for skip in ("5-6", "3-8", "1-10", "1-4,7-10")}
CONTEXTS = (256, 64)        # tokens in a window; the oracles are trained on the first
COLUMNS = [("name", "oracle", "{}"), ("skip", "skip", "{}"), ("compute", "compute", "{:.1%}"),
           ("nothing_256", "nothing, 256", "{:.2f}"), ("ratio_256", "ratio, 256", "{:.3f}"), ("cosine_256", "cosine", "{:.4f}"),
           ("ratio_64", "ratio, 64", "{:.3f}"), ("cosine_64", "cosine", "{:.4f}")]


def train(model, file, flags):
    """Runs train_oracle.py unless the file is there; goes on with a run that was cut."""
    if file.exists():
        return
    cut = Path(f"{file}.unfinished").exists()
    arguments = ["train_oracle.py", *(["--resume"] if cut else [*flags, "--model", model]), "--out", str(file)]
    print("python", shlex.join(arguments), flush=True)
    if subprocess.run([sys.executable, *arguments]).returncode:
        raise ValueError("this command failed")


def measure(model, files):
    """{name: oracle file} -> a row of figures for each, on windows of 256 and of 64 held-out tokens."""
    gpt2, tokenizer = load_gpt2(model)
    paths = {name: load_path(file, gpt2) for name, file in files.items()}
    settings = {name: read_settings(file) for name, file in files.items()}
    nothing = {settings[name]["skip"]: plain_skip(gpt2, path.spans) for name, path in paths.items()}
    ids = load_tokens(next(iter(settings.values()))["text"], tokenizer, CONTEXTS[0])[1]
    rows = [{"name": name, "skip": its["skip"]} for name, its in settings.items()]
    whole = flops(lambda ids: gpt2.run(gpt2.embed(ids), 0, gpt2.config.n_layer), ids[None, :CONTEXTS[0]])
    for row, path in zip(rows, paths.values()):
        row["compute"] = flops(path.hidden, ids[None, :CONTEXTS[0]]) / whole
    for context in CONTEXTS:
        original, *figures = evaluate(gpt2, [*paths.values(), *nothing.values()], ids, context)
        plain = dict(zip(nothing, figures[len(paths):]))
        for row, figure in zip(rows, figures):
            row[f"ratio_{context}"] = figure["ppl"] / original["ppl"]
            row[f"cosine_{context}"] = figure["cosine"]
            row[f"nothing_{context}"] = plain[row["skip"]]["ppl"] / original["ppl"]
    return rows


def draw(rows, file):
    """PPL ratio against compute: one line for the sizes of the oracle, one for what is skipped."""
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "pathoracle"          # the same figures give the same file
    from matplotlib import pyplot as plt
    by_name = {row["name"]: row for row in rows}
    figure, axes = plt.subplots(figsize=(7, 4.2))
    middle = by_name["dim 84"]
    spans = sorted([middle, *(by_name[name] for name in SKIPS if "," not in name)], key=lambda row: row["compute"])
    sizes = sorted([by_name[name] for name in SIZES], key=lambda row: row["compute"])
    for points, label, style in ((spans, "skip pattern, oracle of dim 84", "o-"), (sizes, "oracle size, skip 2-9", "s--")):
        axes.plot([100 * row["compute"] for row in points], [row["ratio_256"] for row in points], style, label=label)
    for row in rows:
        if row["name"] in SKIPS or row["name"] in SIZES:
            if "," in row["name"]:
                axes.plot([100 * row["compute"]], [row["ratio_256"]], "d", label="two spans")
            axes.annotate(row["name"].replace("dim 84", "skip 2-9, dim 84"), (100 * row["compute"], row["ratio_256"]),
                          textcoords="offset points", fontsize=8,
                          xytext={"skip 1-4,7-10": (-76, -12), "dim 168": (6, -12)}.get(row["name"], (6, 5)))
    axes.set(xlabel="block compute of the path, % of the original's", ylabel="held-out PPL ratio, windows of 256",
             title="Embedded model: what a jump costs")
    axes.margins(0.13)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="data/mini", help="directory of the GPT-2, of 12 blocks (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("frontier"), help="directory (%(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, flags in {**LADDER, **SIZES, **SKIPS}.items():
        files[name] = args.out / f"{name.replace(', ', '-').replace(' ', '-')}.safetensors"
        train(args.model, files[name], flags.split())
    rows = measure(args.model, files)
    show(rows, COLUMNS)
    replace_file(args.out / "frontier.json", json.dumps(rows, indent=1).encode())
    draw(rows, args.out / "frontier.svg")


if __name__ == "__main__":
    command(main)
