"""The two commands' options, each with its default and its meaning, and the skip pattern."""

import argparse
import os
import re
from pathlib import Path

from data.checkpoint import read_oracle
from data.cli import Parser, device, non_negative, positive, positive_float, seed
from data.files import check_output, claim

SHIPPED = Path(__file__).parent / "mini"


def parse_skip(pattern, n_layer):
    """"2-9" -> [range(2, 10)], "1-3,5-7" -> [range(1, 4), range(5, 8)]: blocks are counted from 0.

    Raises ValueError for anything but ascending spans of the model's blocks, one between them.
    """
    spans, last = [], -2
    for part in pattern.split(","):
        match = re.fullmatch(r"\s*(\d+)-(\d+)\s*", part)
        if not match:
            raise ValueError(f"skip pattern {pattern!r}: write spans of blocks as in 2-9 or "
                             "1-3,5-7")
        start, end = int(match[1]), int(match[2])
        if start > end:
            raise ValueError(f"skip pattern {pattern!r}: {start}-{end} runs backwards, "
                             f"write {end}-{start}")
        if end >= n_layer:
            raise ValueError(f"skip pattern {pattern!r}: the model has blocks 0 to {n_layer - 1}")
        if start <= last + 1:
            raise ValueError(f"skip pattern {pattern!r}: spans ascend and leave at least one block "
                             "between them")
        spans.append(range(start, end + 1))
        last = end
    return spans


def write_skip(spans):
    """The reverse of parse_skip."""
    return ",".join(f"{span.start}-{span.stop - 1}" for span in spans)


def eval_options(description):
    """The parser of eval_ppl.py."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("oracles", nargs="*", metavar="ORACLE", type=Path, help="files of train_oracle.py "
        "(default: oracle.safetensors in the working directory, else those in data/mini/)")
    add("--model", help="directory or name of the GPT-2 (default: the first oracle's)")
    add("--text", help="docs, wikitext-2 or a text file (default: the first oracle's)")
    add("--context", type=positive, help="tokens in a window (default: the first oracle's)")
    add("--prompt", help="show how each path goes on with this text instead of the tables")
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    add("--device", type=device, default="cpu", help="where to compute (default: %(default)s)")
    return parser


def eval_arguments(description):
    """The options of eval_ppl.py, where oracles is {file: settings}, and what was not given is as
    in the first oracle's training."""
    args = eval_options(description).parse_args()
    own = Path("oracle.safetensors")
    shipped = sorted(SHIPPED.glob("oracle*.safetensors"), key=lambda file: file.stem)
    files = args.oracles or ([own] if own.exists() else map(os.path.relpath, shipped))
    files = [Path(file) for file in files]
    args.oracles = {str(file): read_oracle(file)[0] for file in files}
    first = next(iter(args.oracles.values()))
    for name in ("model", "text", "context"):
        setattr(args, name, getattr(args, name) or first[name])
    if args.json and args.prompt is not None:
        raise ValueError("--prompt shows text, --json writes figures: give one of them")
    if args.json:
        check_output(args.json, "--json", [*files, args.model, args.text])
    return args


def train_options(description):
    """The parser of train_oracle.py."""
    parser = Parser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--skip", default="2-9", help="blocks to skip, counted from 0, as in 2-9 or 1-3,5-6,8-10")
    add("--model", default="data/mini", help="a directory in Hugging Face's GPT-2 layout, or gpt2, "
        "gpt2-medium, gpt2-large, gpt2-xl, distilgpt2, owner/name")
    add("--text", default="docs", help="docs (of Python, NumPy and PyTorch), wikitext-2, or a file")
    add("--dim", type=positive, help="width of the oracle (None: 7/16 of the model's)")
    add("--blocks", type=positive, default=1, help="blocks of the oracle")
    add("--heads", type=positive, default=4, help="attention heads of each of them")
    add("--shared", action="store_true", help="one oracle for all spans, all of one length")
    add("--cos-weight", type=non_negative, default=0.5, help="of 1 - cosine in the loss")
    add("--kl-weight", type=non_negative, default=0.6, help="of the KL divergence of the path from "
        "the full model, in the last 30%% of the steps")
    add("--cache-weight", type=non_negative, default=1.0, help="of the KL divergence of the full "
        "model over the path's cache, in the last half of the steps")
    add("--steps", type=positive, default=1500, help="optimizer steps")
    add("--batch-size", type=positive, default=4, help="windows in a step")
    add("--context", type=positive, help="tokens in a window (None: the model's, at most 256)")
    add("--lr", type=positive_float, default=2e-2, help="learning rate, falls to zero")
    add("--seed", type=seed, default=0, help="of weights and windows")
    add("--out", type=Path, default=Path("oracle.safetensors"), help="the file written")
    add("--resume", action="store_true", help="go on with the unfinished run beside --out, or with "
        "--out; its settings hold, but for --steps, --lr, --model and --device")
    add("--device", type=device, default="cpu", help="where to compute, such as cuda")
    return parser


def train_arguments(description):
    """-> settings, which the oracle's file keeps; out, device, resume; where the run is kept until
    it is complete, and the file to resume."""
    parser = train_options(description)
    args = parser.parse_args()
    check_output(args.out, "--out", (args.model, args.text))
    unfinished = claim(args.out)
    old, before = unfinished if unfinished.exists() else args.out, {"step": 0}
    if args.resume:
        before = read_oracle(old)[0]
        parser.set_defaults(**before)               # what is not given stays as it was
        args = parser.parse_args()
    elif unfinished.exists():
        raise ValueError(f"{unfinished} holds a run that was cut: --resume, or delete it")
    for name in set(before) & set(vars(args)) - {"steps", "lr", "model"}:
        if getattr(args, name) != before[name]:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"--resume goes on with {option} {before[name]}: leave {option} out, "
                             "or train anew")
    if before["step"] >= args.steps and old == args.out:
        raise ValueError(f"{old} has all its {before['step']} steps: give more --steps to go on")
    settings = {**before, **vars(args)}
    return settings, *(settings.pop(name) for name in ("out", "device", "resume")), unfinished, old


def check_context(context, config):
    """The context, if it fits the model; else ValueError."""
    if not 8 <= context <= config.n_positions:
        raise ValueError(f"--context takes 8 to {config.n_positions} for this model")
    return context


def fit_to_model(settings, config):
    """Sets what depends on the model and was not given; ValueError for what does not fit it."""
    heads, lengths = settings["heads"], set(map(len, parse_skip(settings["skip"], config.n_layer)))
    settings["dim"] = settings["dim"] or max(1, config.n_embd * 7 // 16 // heads) * heads
    settings["context"] = check_context(settings["context"] or min(config.n_positions, 256), config)
    if settings["dim"] % heads:
        raise ValueError(f"--dim {settings['dim']} is not divisible by --heads {heads}")
    if settings["shared"] and len(lengths) > 1:
        raise ValueError(f"--shared needs spans of one length, unlike those of {settings['skip']}")
