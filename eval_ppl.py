"""What a jump costs, on held-out text:  python eval_ppl.py [ORACLE ...]

The first table sends the whole text through the path. The second sends only the prompt through it
and lets the full model, GPT-2 as it is, go on over the KV cache that was left: in text, and in a
passage that stood in the prompt before (recall).
"""

import json
import math
from bisect import bisect_right
from pathlib import Path

import torch
from torch.nn import functional as F

from data.cli import command, progress, show
from data.corpus import load_tokens, sample_windows
from data.files import replace_file
from data.greedy import show_texts
from data.measure import costs, flops
from data.options import eval_options
from load_weights import load_gpt2
from model import LayerCache
from oracle import default_replay, load_path, no_oracle, read_oracle

SHIPPED = Path(__file__).parent / "data" / "mini"
RECALL_WINDOWS = 192
DECODE = 48                 # tokens by which --prompt is continued
COST = ("compute", "compute", "{:.1%}"), ("ppl", "PPL", "{:.2f}"), ("ratio", "ratio", "{:.3f}")
TIME = ("prefill_ms", "prefill ms", "{:.1f}"), ("speedup", "speed-up", "{:.2f}x")
PATH_COLUMNS = (("path", "path", "{}"), ("blocks_run", "blocks", "{}"), *COST,
                ("cosine", "cosine", "{:.4f}"), ("mse", "MSE", "{:.4g}"), *TIME)
PROMPT_COLUMNS = (("path", "prompt read by", "{}"), *COST, ("first_16_ratio", "first 16", "{:.3f}"),
                  ("recall", "recall", "{:.2f}"), ("kept", "kept", "{:.1%}"), *TIME)


def token_losses(logits, targets):
    """logits (B, N, V), targets (B, N) -> nats a token (B, N); perplexity is exp of their mean."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


def windows(ids, context):
    """1-D ids -> windows without overlap: batches (B, context) of about 2,048 tokens, then what
    is left."""
    whole, batch_size = len(ids) // context * context, max(1, 2048 // context)
    batches = list(ids[:whole].view(-1, context).split(batch_size)) if whole else []
    return batches + [ids[None, whole:]] if len(ids) - whole > 1 else batches


@torch.no_grad()
def evaluate(gpt2, paths, ids, context):
    """The full model and each path over all windows of 1-D ids -> [{"ppl", "cosine", "mse"}, ...].

    ppl: all tokens but the first of each window. cosine and mse compare predicted and true states
    behind the spans, token by token, and are means over the spans.
    """
    sums = torch.zeros(1 + len(paths), 3, dtype=torch.float64)          # of loss, cosine, mse
    scored = seen = 0
    for window in progress(windows(ids, context)):                      # (B, T)
        targets = window[:, 1:]
        true = gpt2.states(window, gpt2.config.n_layer)                 # each (B, T, C)
        sums[0, 0] += token_losses(gpt2.unembed(true[-1])[:, :-1], targets).sum().item()
        for row, path in zip(sums[1:], paths, strict=True):
            predicted = []                                              # of each span, (B, T, C)
            hooks = [oracle.register_forward_hook(lambda _, x, y, to=predicted: to.append(y))
                     for oracle in dict.fromkeys(path.oracles)]
            row[0] += token_losses(path(window)[:, :-1], targets).sum().item()
            for hook in hooks:
                hook.remove()
            for span, y in zip(path.spans, predicted, strict=True):
                t, n = true[span.stop], len(path.spans)
                row[1] += F.cosine_similarity(y, t, dim=-1).sum().item() / n
                row[2] += (y - t).square().mean(dim=-1).sum().item() / n
        scored, seen = scored + targets.numel(), seen + window.numel()
    sums[0, 1] = seen
    return [{"ppl": math.exp(loss / scored), "cosine": cosine / seen, "mse": mse / seen}
            for loss, cosine, mse in sums.tolist()]


def readers(path, prompt, replay):
    """{row: ids (B, prompt) -> logits (B, V), KV cache}: the ways to read a prompt."""
    gpt2, bare = path.gpt2, no_oracle(path.gpt2, path.spans)
    skipped = {i for span in path.spans for i in span}
    ids = torch.zeros(1, prompt, dtype=torch.long, device=gpt2.wte.weight.device)
    budget = flops(lambda ids: path.prefill(ids, replay), ids)
    n = bisect_right(range(1, prompt), budget, key=lambda n: flops(gpt2.prefill, ids[:, :n]))

    def without_cache(ids):
        logits, cache = path.prefill(ids, 0)
        return logits, [LayerCache() if i in skipped else c for i, c in enumerate(cache)]

    return {"full model": gpt2.prefill,
            "oracle prefill": lambda ids: path.prefill(ids, replay),
            "oracle prefill, no replay": lambda ids: path.prefill(ids, 0),
            "no oracle": lambda ids: bare.prefill(ids, replay),
            "no cache in the skipped blocks": without_cache,
            f"full model, last {n} tokens": lambda ids: gpt2.prefill(ids[:, -n:]),
            "no prompt": lambda ids: gpt2.prefill(ids[:, -1:])}


@torch.no_grad()
def losses_after(path, batches, prompt, reads):
    """{row: (windows, T - prompt)}: nats a token of the full model behind a prompt.

    batches: windows (B, T), of which the first `prompt` tokens are read and the others scored. The
    row "path throughout" is the path's own loss on them.
    """
    losses = {name: [] for name in (*reads, "path throughout")}
    for window in progress(batches):
        inputs, targets = window[:, prompt:-1], window[:, prompt:]
        losses["path throughout"].append(token_losses(path(window)[:, prompt - 1:-1], targets))
        for name, read in reads.items():
            last, cache = read(window[:, :prompt])                      # (B, V), KV cache
            logits = torch.cat([last[:, None], path.gpt2(inputs, cache)], dim=1)
            losses[name].append(token_losses(logits, targets))
    return {name: torch.cat(parts) for name, parts in losses.items()}


def recall_windows(ids, context):
    """Windows of held-out text with a passage of it again, which begins at a quarter of them:
    of 256 tokens, 192 of text, then tokens 64 to 111 again. -> batches (B, T)"""
    start, passage = context // 4, max(2, context * 3 // 16)
    text = sample_windows(ids, RECALL_WINDOWS, context * 3 // 4, seed=0, step=0)
    both = torch.cat([text, text[:, start:start + passage]], dim=1)
    return both.split(max(1, 2048 // context))


def path_rows(gpt2, named_paths, ids, context):
    """Rows of the first table: the full model, no oracle once for each pattern, each path."""
    paths = {}
    for name, path in named_paths:
        pattern = ",".join(f"{span.start}-{span.stop - 1}" for span in path.spans)
        paths.setdefault(f"no oracle, {pattern}", no_oracle(gpt2, path.spans))
        paths[name] = path
    n_layer, full = gpt2.config.n_layer, "full model"
    hidden = {full: lambda ids: gpt2.run(gpt2.embed(ids), 0, n_layer),
              **{name: path.hidden for name, path in paths.items()}}
    cost = costs({name: lambda ids, h=h: gpt2.unembed(h(ids)[:, -1]) for name, h in hidden.items()},
                 ids[None, :context])
    blocks = {full: n_layer, **{name: n_layer - path.n_skipped() for name, path in paths.items()}}
    figures = evaluate(gpt2, list(paths.values()), ids, context)
    return [{"path": name, "blocks_run": blocks[name], "ratio": its["ppl"] / figures[0]["ppl"],
             **its, **cost[name]} for name, its in zip(hidden, figures, strict=True)]


def prompt_rows(path, ids, context, replay):
    """Rows of the second table: three quarters of each window are read, the rest is scored.

    recall: nats a token of a passage that comes again, but for its first sixth; kept: the share of
    what the full model gains there from the prompt, None if that is less than half of its loss.
    """
    gpt2, prompt = path.gpt2, context * 3 // 4
    reads = readers(path, prompt, replay)
    whole = [window for window in windows(ids, context) if window.shape[1] == context]
    losses = losses_after(path, whole, prompt, reads)
    recall = {name: its[:, its.shape[1] // 6:].mean().item() for name, its
              in losses_after(path, recall_windows(ids, context), prompt, reads).items()}
    gain = recall["no prompt"] - recall["full model"]
    reads["path throughout"] = lambda ids: gpt2.unembed(path.hidden(ids)[:, -1])
    reads["no cache in the skipped blocks"] = reads["path throughout"]      # all that this needs
    cost, full, rows = costs(reads, ids[None, :prompt]), losses["full model"], []
    for name, its in sorted(losses.items(), key=lambda item: item[1].mean()):
        ppl, early = its.mean().exp().item(), its[:, :16].mean().exp().item()
        blocks = gpt2.config.n_layer - (0 if name.startswith(("full", "no p")) else path.n_skipped())
        rows.append({"path": name, "blocks_run": blocks, "cosine": None, "mse": None, **cost[name],
                     "ppl": ppl, "ratio": ppl / full.mean().exp().item(),
                     "first_16_ppl": early,
                     "first_16_ratio": early / full[:, :16].mean().exp().item(),
                     "recall": recall[name],
                     "kept": (recall["no prompt"] - recall[name]) / gain
                     if gain > recall["no prompt"] / 2 else None})
    return rows


@torch.no_grad()
def show_continuations(gpt2, tokenizer, named_paths, text, replay):
    """Prints how each path goes on with a prompt, greedily: perplexity does not show loops."""
    ids = torch.tensor([tokenizer.encode_ordinary(text)], device=gpt2.wte.weight.device).long()
    n = min(DECODE, gpt2.config.n_positions - ids.shape[1])
    if ids.shape[1] == 0 or n < 1:
        raise ValueError(f"--prompt has {ids.shape[1]} tokens: it takes 1 to "
                         f"{gpt2.config.n_positions - 1} for this model")
    outs = {"full model": gpt2.decode(*gpt2.prefill(ids), n)}               # (1, n)
    for name, path in named_paths:
        outs[f"{name}: prefill, then the full model"] = gpt2.decode(*path.prefill(ids, replay), n)
        out = ids
        for _ in range(n):              # without a cache: the path reads all of it for each token
            out = torch.cat([out, path(out)[:, -1:].argmax(dim=-1)], dim=1)
        outs[f"{name}: path throughout"] = out[:, -n:]
    show_texts(outs, text, tokenizer)


def main():
    args = eval_options(__doc__).parse_args()

    own = Path("oracle.safetensors")
    files = args.oracles or ([own] if own.exists() else sorted(SHIPPED.glob("oracle*.safetensors")))
    settings = [read_oracle(file)[0] for file in files]
    model, text, context = (getattr(args, name) or settings[0][name]
                            for name in ("model", "text", "context"))
    gpt2, tokenizer = load_gpt2(model, args.device)
    if not 8 <= context <= gpt2.config.n_positions or (args.replay or 0) < 0:
        raise ValueError(f"--context takes 8 to {gpt2.config.n_positions} for this model, "
                         "--replay 0 or more")
    if args.json and args.prompt is not None:
        raise ValueError("--prompt shows text, --json writes figures: give one of them")
    names = [file.name if len({f.name for f in files}) == len(files) else str(file) for file in files]
    named_paths = [(name, load_path(file, gpt2)) for name, file in zip(names, files, strict=True)]
    for file, its in zip(files, settings, strict=True):
        print(f"{file}: oracle for blocks {its['skip']} of {its['model']}, {its['step']} of "
              f"{its['steps']} steps on {its['text']}")
    if args.prompt is not None:
        return show_continuations(gpt2, tokenizer, named_paths, args.prompt, args.replay)

    ids = load_tokens(text, tokenizer, context)[1].to(args.device)
    print(f"{model} on {len(ids):,} held-out tokens of {text}, windows of {context}\n", flush=True)
    rows, continuation = path_rows(gpt2, named_paths, ids, context), []
    show(rows, PATH_COLUMNS)
    prompt = context * 3 // 4
    replay = default_replay(prompt) if args.replay is None else args.replay
    for name, path in named_paths:
        print(f"{name}: {prompt} tokens of prompt, the next {context - prompt} scored, "
              f"replay {replay}\n", flush=True)
        its = prompt_rows(path, ids, context, replay)
        show(its, PROMPT_COLUMNS)
        if its[0]["kept"] is None:
            print(f"{model} hardly copies from its prompt: recall cannot be judged on it\n")
        continuation += its if len(files) == 1 else [{**row, "oracle": name} for row in its]
    if args.json:
        figures = {"model": model, "text": text, "tokens": len(ids), "context": context,
                   "rows": rows, "continuation": continuation}
        replace_file(args.json, json.dumps(figures, indent=1).encode())


if __name__ == "__main__":
    command(main)
