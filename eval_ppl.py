"""What a jump costs, on held-out text:  python eval_ppl.py [ORACLE ...]

The first table sends the whole text through the path, the second only a prompt: the full model then
goes on over the KV cache that was left, in text and in a passage that stood in the prompt (recall).
"""

import data.interrupt  # noqa: F401  isort: skip (first, for Ctrl-C while torch loads)
import json
from bisect import bisect_right

import torch
from torch.nn import functional as F

from data.cli import command, progress, show
from data.corpus import load_tokens, recall_windows, windows
from data.files import replace_file
from data.greedy import show_continuations
from data.measure import costs, flops
from data.options import check_context, eval_arguments, write_skip
from data.tables import PATH_COLUMNS, PROMPT_COLUMNS, path_table, prompt_table
from load_weights import load_gpt2
from oracle import load_path, no_oracle


def token_losses(logits, targets):
    """logits (B, N, V), targets (B, N) -> nats a token (B, N); perplexity is exp of their mean."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


@torch.no_grad()
def evaluate(paths, ids, context):
    """{name: path} -> {name: {"ppl", "cosine", "mse"}} over all windows of held-out 1-D ids.

    ppl: all tokens but the first of each window. cosine and mse compare predicted and true states
    behind the spans, token by token, and are means over the spans.
    """
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in paths}    # loss, cosine, mse
    scored, seen, gpt2 = 0, 0, next(iter(paths.values())).gpt2
    for window in progress(windows(ids, context)):                          # (B, T)
        targets = window[:, 1:]
        true = gpt2.states(window, gpt2.config.n_layer)                     # each (B, T, C)
        for name, path in paths.items():
            predicted = []                                                  # (B, T, C) of each span
            hooks = [oracle.register_forward_hook(lambda _, x, y, to=predicted: to.append(y))
                     for oracle in dict.fromkeys(path.oracles)]
            sums[name][0] += token_losses(path(window)[:, :-1], targets).sum().item()
            for hook in hooks:
                hook.remove()
            sums[name][1] += 0 if path.spans else window.numel()    # no jump: cosine 1
            for span, y in zip(path.spans, predicted, strict=True):
                t, n = true[span.stop], len(path.spans)
                sums[name][1] += F.cosine_similarity(y, t, dim=-1).sum().item() / n
                sums[name][2] += (y - t).square().mean(dim=-1).sum().item() / n
        scored, seen = scored + targets.numel(), seen + window.numel()
    return {name: {"ppl": (loss / scored).exp().item(), "cosine": (cosine / seen).item(),
                   "mse": (mse / seen).item()} for name, (loss, cosine, mse) in sums.items()}


def readers(path, ids):
    """{row: ids (B, T) -> logits (B, V), KV cache}: the ways to read a prompt as long as ids."""
    gpt2 = path.gpt2
    n = 1 + bisect_right(range(2, ids.shape[1]), flops(path.prefill, ids),      # 1 at least
                         key=lambda n: flops(gpt2.prefill, ids[:, :n]))

    def without_cache(ids):
        cache, skipped = path.prefill(ids)[1], {i for span in path.spans for i in span}
        for i, layer in enumerate(cache):       # the last token is read again, without them
            kept = 0 if i in skipped else ids.shape[1] - 1
            layer.k, layer.v = layer.k[:, :, :kept], layer.v[:, :, :kept]
        return gpt2(ids[:, -1:], cache)[:, -1], cache

    return {"full model": gpt2.prefill,
            "oracle prefill": path.prefill,
            "no oracle": no_oracle(gpt2, path.spans).prefill,
            "no cache in the skipped blocks": without_cache,
            f"full model, last {n} tokens": lambda ids: gpt2.prefill(ids[:, -n:]),
            "no prompt": lambda ids: gpt2.prefill(ids[:, -1:])}


@torch.no_grad()
def losses_after(gpt2, batches, prompt, reads):
    """{row: (windows, T - prompt)}: nats a token of the full model behind a prompt, of windows
    (B, T) whose first `prompt` tokens are read and the others scored."""
    losses = {name: [] for name in reads}
    for window in progress(batches):
        for name, read in reads.items():
            last, cache = read(window[:, :prompt])                      # (B, V), KV cache
            logits = torch.cat([last[:, None], gpt2(window[:, prompt:-1], cache)], dim=1)
            losses[name].append(token_losses(logits, window[:, prompt:]))
    return {name: torch.cat(parts) for name, parts in losses.items()}


@torch.no_grad()
def own_losses(path, batches, first):
    """(windows, T - first): nats a token of the path itself, from the token `first` on."""
    return torch.cat([token_losses(path(window)[:, first - 1:-1], window[:, first:])
                      for window in progress(batches)])


def path_rows(paths, ids, context):
    """Rows of the first table: the full model, no oracle once a pattern, each of {name: path}."""
    gpt2 = next(iter(paths.values())).gpt2
    rows = {"full model": no_oracle(gpt2, [])}
    for name, path in paths.items():
        rows.setdefault(f"no oracle, {write_skip(path.spans)}", no_oracle(gpt2, path.spans))
        rows[name] = path
    cost = costs({name: lambda ids, path=path: gpt2.unembed(path.hidden(ids)[:, -1])
                  for name, path in rows.items()}, ids[None, :context])
    blocks = {name: gpt2.config.n_layer - sum(map(len, path.spans)) for name, path in rows.items()}
    return path_table(evaluate(rows, ids, context), cost, blocks)


def prompt_rows(path, ids, context):
    """Rows of the second table: three quarters of each window are read, the rest is scored."""
    prompt = context * 3 // 4
    reads = readers(path, ids[None, :prompt])
    whole = [window for window in windows(ids, context) if window.shape[1] == context]
    text, passage = ({**losses_after(path.gpt2, batches, prompt, reads),
                      "path throughout": own_losses(path, batches, prompt)}
                     for batches in (whole, recall_windows(ids, context)))
    reads["path throughout"] = lambda ids: path.gpt2.unembed(path.hidden(ids)[:, -1])
    return prompt_table(text, passage, costs(reads, ids[None, :prompt]))


def main():
    args = eval_arguments(__doc__)
    gpt2, tokenizer = load_gpt2(args.model, args.device)
    context = check_context(args.context, gpt2.config)
    paths = {str(file): load_path(file, gpt2) for file in args.oracles}
    for file, its in args.oracles.items():
        print(f"{file}: oracle for blocks {its['skip']} of {its['model']}, {its['step']} of "
              f"{its['steps']} steps on {its['text']}")
    if args.prompt is not None:
        paths = {"full model": no_oracle(gpt2, []), **paths}
        return show_continuations(gpt2, tokenizer, paths, args.prompt)

    ids = load_tokens(args.text, tokenizer, context)[1].to(args.device)
    print(f"{args.model} on {len(ids):,} held-out tokens of {args.text}, windows of {context}\n")
    rows, continuation = path_rows(paths, ids, context), []
    show(rows, PATH_COLUMNS)
    for name, path in paths.items():
        print(f"{name}: {context * 3 // 4} tokens of prompt, the rest of each window scored\n")
        its = prompt_rows(path, ids, context)
        show(its, PROMPT_COLUMNS)
        if its[0]["kept"] is None:
            print(f"{args.model} hardly copies from its prompt: recall cannot be judged on it\n")
        continuation += its if len(paths) == 1 else [{**row, "oracle": name} for row in its]
    if args.json:
        figures = {"model": args.model, "text": args.text, "tokens": len(ids), "context": context,
                   "rows": rows, "continuation": continuation}
        replace_file(args.json, json.dumps(figures, indent=1).encode())


if __name__ == "__main__":
    command(main)
