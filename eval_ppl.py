"""What a skip costs, on text that neither GPT-2 nor the oracle was trained on:  python eval_ppl.py [ORACLE ...]

The first table sends the whole text through the path. The second sends only the prompt through it and lets the
unmodified GPT-2 go on with the KV cache that the path left. `evaluate` and `continuations` are the two measurements.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch.nn import functional as F

from data.cli import CONTINUATION_COLUMNS, PATH_COLUMNS, Parser, command, device, positive, progress, show
from data.corpus import load_tokens
from data.cost import flops, milliseconds
from data.files import replace_file
from data.greedy import show_continuations
from load_weights import load_gpt2
from model import LayerCache
from oracle import default_replay, load_path, plain_skip, read_settings, true_states

SHIPPED = Path(__file__).parent / "data" / "mini" / "oracle.safetensors"


def token_losses(logits, targets):
    """logits (B, N, V), targets (B, N) -> the loss of each token in nats, (B, N); perplexity is exp of their mean."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def windows(ids, context):
    """Cuts 1-D ids into non-overlapping windows: batches (B, context) of about 2,048 tokens, the last window what is left."""
    whole, batch_size = len(ids) // context * context, max(1, 2048 // context)
    batches = list(ids[:whole].view(-1, context).split(batch_size)) if whole else []
    return batches + [ids[None, whole:]] if len(ids) - whole > 1 else batches


@torch.no_grad()
def evaluate(gpt2, paths, ids, context):
    """The original and each path over all windows of 1-D ids -> a list of {"ppl", "cosine", "mse"}, the original first.

    ppl is exp of the mean loss over all tokens but the first of each window. cosine and mse compare the predicted with
    the true hidden states behind the spans, token by token, and are means over the spans.
    """
    sums = torch.zeros(1 + len(paths), 3, dtype=torch.float64)          # of loss, cosine, mse
    scored = seen = 0
    for window in progress(windows(ids, context)):
        targets = window[:, 1:]
        true = true_states(gpt2, window, gpt2.config.n_layer)
        sums[0, 0] += token_losses(gpt2.unembed(true[-1])[:, :-1], targets).sum().item()
        for row, path in zip(sums[1:], paths):
            trace = []
            x = path.jump(true[path.spans[0].start], trace=trace)
            row[0] += token_losses(gpt2.unembed(x)[:, :-1], targets).sum().item()
            for span, (_, _, y) in zip(path.spans, trace):
                row[1] += F.cosine_similarity(y, true[span.stop], dim=-1).sum().item() / len(trace)
                row[2] += (y - true[span.stop]).square().mean(dim=-1).sum().item() / len(trace)
        scored, seen = scored + targets.numel(), seen + window.numel()
    sums[0, 1] = seen
    return [{"ppl": math.exp(loss / scored), "cosine": cosine / seen, "mse": mse / seen} for loss, cosine, mse in sums.tolist()]


def prefills(path, replay):
    """{name: function of prompt ids -> (logits, KV cache)}: the ways to read a prompt that are compared."""
    skipped = {i for span in path.spans for i in span}

    def no_cache(ids):
        logits, cache = path.prefill(ids, 0)
        return logits, [LayerCache() if i in skipped else c for i, c in enumerate(cache)]

    reads = {"original": lambda ids: path.prefill(ids, replay=ids.shape[1]),
             "oracle prefill": lambda ids: path.prefill(ids, replay),
             "oracle prefill, no replay": lambda ids: path.prefill(ids, 0),
             "prefill with nothing": lambda ids: plain_skip(path.gpt2, path.spans).prefill(ids, replay)}
    if len(skipped) < path.gpt2.config.n_layer:         # else no cache would be left at all
        reads["no cache in the skipped blocks"] = no_cache
    return reads


@torch.no_grad()
def continuations(path, ids, prompt, length, replay):
    """Losses of the *full* model on what follows a prompt, for each way to read the prompt, and of the path itself.

    -> {name: (windows, length)}: windows of prompt + length tokens; the last `length` are scored, the same for every name.
    """
    gpt2, losses = path.gpt2, {}
    batches = [w for w in windows(ids, prompt + length) if w.shape[1] == prompt + length]
    reads = prefills(path, replay)
    for window in progress(batches):
        head, inputs, targets = window[:, :prompt], window[:, prompt:-1], window[:, prompt:]
        logits = {"path throughout": path(window)[:, prompt - 1:-1],
                  "no prompt": gpt2(window[:, prompt - 1:-1])}      # its last token alone, to have something to go on from
        for name, read in reads.items():
            last, cache = read(head)
            logits[name] = torch.cat([last[:, None], gpt2(inputs, cache)], dim=1)
        for name in logits:
            losses.setdefault(name, []).append(token_losses(logits[name], targets))
    return {name: torch.cat(parts) for name, parts in losses.items()}


def path_rows(gpt2, named_paths, ids, context):
    """Rows of the first table: the original, the same blocks skipped with nothing in their place, each path."""
    skips, names, paths = [], ["original"], []
    several = any(path.spans != named_paths[0][1].spans for _, path in named_paths)
    for name, path in named_paths:
        if path.spans not in skips:             # once for each pattern
            skips.append(path.spans)
            names.append("skip" + several * f" {','.join(f'{span.start}-{span.stop - 1}' for span in path.spans)}")
            paths.append(plain_skip(gpt2, path.spans))
        names.append(name)
        paths.append(path)
    figures = evaluate(gpt2, paths, ids, context)
    reads = [lambda ids: gpt2.run(gpt2.embed(ids), 0, gpt2.config.n_layer), *(path.hidden for path in paths)]
    times = milliseconds([lambda ids, read=read: gpt2.unembed(read(ids)[:, -1]) for read in reads], ids[None, :context])
    operations = [flops(read, ids[None, :context]) for read in reads]
    skipped = [0, *(sum(map(len, path.spans)) for path in paths)]
    return [{"path": name, "blocks_run": gpt2.config.n_layer - n, "compute": operation / operations[0], "ppl": figure["ppl"],
             "ratio": figure["ppl"] / figures[0]["ppl"], "cosine": figure["cosine"], "mse": figure["mse"],
             "prefill_ms": ms, "speedup": times[0] / ms}
            for name, n, operation, figure, ms in zip(names, skipped, operations, figures, times)]


def continuation_rows(path, ids, prompt, length, replay):
    """Rows of the second table: windows of `prompt` tokens to read and `length` to score."""
    losses = continuations(path, ids, prompt, length, replay)
    reads = {**prefills(path, replay), "path throughout": lambda ids: path.gpt2.unembed(path.hidden(ids)[:, -1])}
    # what that cache costs is not measured: prefills makes it to throw it away, and the path alone needs no more
    reads.pop("no cache in the skipped blocks", None)
    times = dict(zip(reads, milliseconds(reads.values(), ids[None, :prompt])))
    operations = {name: flops(read, ids[None, :prompt]) for name, read in reads.items()}
    for cost in times, operations:
        cost["no cache in the skipped blocks"] = cost["path throughout"]
    n_layer, skipped = path.gpt2.config.n_layer, sum(map(len, path.spans))
    rows = []
    for name in sorted(losses, key=lambda name: losses[name].mean()):
        ppl, early = losses[name].mean().exp().item(), losses[name][:, :16].mean().exp().item()
        run = {"original": n_layer, "no prompt": 0}.get(name, n_layer - skipped)
        rows.append({"path": name, "blocks_run": run, "compute": operations.get(name, 0) / operations["original"], "ppl": ppl,
                     "ratio": ppl / losses["original"].mean().exp().item(), "first_16_ppl": early,
                     "first_16_ratio": early / losses["original"][:, :16].mean().exp().item(), "cosine": None, "mse": None,
                     "prefill_ms": times.get(name), "speedup": times["original"] / times[name] if name in times else None})
    return rows


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("oracles", nargs="*", metavar="ORACLE", type=Path, help="files of train_oracle.py; default: "
                        "oracle.safetensors in the working directory, else the one in data/mini/")
    parser.add_argument("--model", help="directory or name of the GPT-2 (default: what the first oracle was trained on)")
    parser.add_argument("--text", help="docs, wikitext-2 or a text file (default: what the first oracle was trained on)")
    parser.add_argument("--context", type=positive, help="tokens in a window (default: as in training of the first oracle)")
    parser.add_argument("--replay", type=int, help="how many of a prompt's last tokens the full model reads (default: a sixth "
                        "of the prompt, rounded up to a multiple of 8)")
    parser.add_argument("--prompt", help="show the greedy continuation of this text by each path instead of the tables")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--device", type=device, default="cpu", help="where to compute, such as cuda (default: %(default)s)")
    args = parser.parse_args()

    files = args.oracles or [Path("oracle.safetensors") if Path("oracle.safetensors").exists() else SHIPPED]
    settings = [read_settings(file) for file in files]
    model, text = args.model or settings[0]["model"], args.text or settings[0]["text"]
    context = args.context or settings[0]["context"]
    gpt2, tokenizer = load_gpt2(model, args.device)
    if context > gpt2.config.n_positions or context < 8 or (args.replay or 0) < 0:
        raise ValueError(f"--context takes 8 to {gpt2.config.n_positions} for this model, --replay 0 or more")
    if args.json and args.prompt is not None:
        raise ValueError("--prompt shows text, --json writes the figures of the tables: give one of them")
    if args.json and not args.json.parent.is_dir():
        raise ValueError(f"--json {args.json}: there is no directory {args.json.parent}")
    one_name_twice = len({file.name for file in files}) < len(files)
    named_paths = [(str(file) if one_name_twice else file.name, load_path(file, gpt2)) for file in files]
    for file, its in zip(files, settings):
        print(f"{file}: {its['oracle']} oracle for blocks {its['skip']} of {its['model']}, {its['step']} of {its['steps']} steps "
              f"on {its['text']}")
    if args.prompt is not None:
        return show_continuations(gpt2, tokenizer, named_paths, args.prompt, args.replay)

    ids = load_tokens(text, tokenizer, context)[1].to(args.device)
    print(f"{model} on {len(ids):,} held-out tokens of {text}, windows of {context}\n", flush=True)
    rows = path_rows(gpt2, named_paths, ids, context)
    show(rows, PATH_COLUMNS)
    prompt = context * 3 // 4
    replay = default_replay(prompt) if args.replay is None else args.replay
    continuation = []
    for name, path in named_paths:
        print(f"{name}: {prompt} tokens of prompt, the next {context - prompt} scored, replay {replay}\n", flush=True)
        its = continuation_rows(path, ids, prompt, context - prompt, replay)
        show(its, CONTINUATION_COLUMNS)
        continuation += its if len(named_paths) == 1 else [{**row, "oracle": name} for row in its]
    if args.json:
        figures = {"model": model, "text": text, "tokens": len(ids), "context": context, "rows": rows}
        replace_file(args.json, json.dumps({**figures, "continuation": continuation}, indent=1).encode())


if __name__ == "__main__":
    command(main)
