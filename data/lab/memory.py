"""What the model remembers of its prompt, by who read it:  python -m data.lab.memory [ORACLE ...]

The mean loss hides whether a skipped block was needed for grammar or for looking things up. So the
loss behind a prompt (the second table of eval_ppl.py) is split as in Zoology (Arora et al. 2023,
arXiv 2312.04927): tokens that complete a pair of tokens which stood in the prompt, "hits", and all
others. Then, where nothing but memory helps: pairs of random tokens, and at the end one of the
keys; exact is the share of prompts whose most likely next token is its value.
"""

import argparse
from pathlib import Path

import torch

from data.checkpoint import read_oracle
from data.cli import Parser, command, positive, show
from data.corpus import load_tokens, windows
from data.options import SHIPPED
from eval_ppl import losses_after, own_losses, readers
from load_weights import load_gpt2
from oracle import load_path

PROMPTS = 256
HIT_COLUMNS = [("path", "prompt read by", "{}"), ("hits", "hits", "{:.3f}"),
               ("hits_excess", "excess", "{:+.3f}"), ("others", "others", "{:.3f}"),
               ("others_excess", "excess", "{:+.3f}")]
LOOKUP_COLUMNS = [("path", "pairs read by", "{}"), ("exact", "exact", "{:.1%}")]


def hits(window, prompt):
    """window (B, T) -> (B, T - prompt), True where a token behind the prompt and the one before it
    stood in the prompt as a pair."""
    pairs = torch.stack([window[:, :-1], window[:, 1:]], dim=-1)            # (B, T - 1, 2)
    new, old = pairs[:, prompt - 1:, None], pairs[:, None, :prompt - 1]
    return (new == old).all(dim=-1).any(dim=-1)         # (B, T - prompt, prompt - 1) -> any of them


def hit_rows(losses, hit):
    """{row: nats a token, (windows, N)}, hits (windows, N) -> rows of the first table."""
    full = losses["full model"]
    return [{"path": name, "hits": its[hit].mean(), "hits_excess": (its - full)[hit].mean(),
             "others": its[~hit].mean(), "others_excess": (its - full)[~hit].mean()}
            for name, its in losses.items()]


def lookup_prompts(vocab_size, pairs, prompts=PROMPTS):
    """key value key value ... key, of distinct random tokens but for the last, which is one of the
    keys, each in turn -> ids (prompts, 2 * pairs + 1), its value (prompts)."""
    ids = torch.ones(prompts, vocab_size).multinomial(
        2 * pairs, generator=torch.Generator().manual_seed(0))              # distinct in each row
    key = 2 * (torch.arange(prompts) % pairs)[:, None]
    return torch.cat([ids, ids.gather(1, key)], dim=1), ids.gather(1, key + 1)[:, 0]


@torch.no_grad()
def lookup_rows(path, pairs):
    """Rows of the second table: the pairs are read, the full model goes on with the key."""
    ids, value = lookup_prompts(path.gpt2.config.vocab_size, pairs)
    logits = {}                                                             # each (B, V)
    for name, read in readers(path, ids[:1, :-1]).items():
        cache = read(ids[:, :-1])[1]
        logits[name] = path.gpt2(ids[:, -1:], cache)[:, -1]
    logits["path throughout"] = path(ids)[:, -1]
    return [{"path": name, "exact": (its.argmax(dim=-1) == value).float().mean().item()}
            for name, its in logits.items()]


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("oracles", nargs="*", metavar="ORACLE", type=Path,
                        default=[SHIPPED / "oracle.safetensors"],
                        help="files of train_oracle.py (default: the one in data/mini)")
    parser.add_argument("--pairs", type=positive, default=16, help="to look up in (%(default)s)")
    args = parser.parse_args()

    for file in args.oracles:
        settings = read_oracle(file)[0]
        context = settings["context"]
        prompt = context * 3 // 4
        gpt2, tokenizer = load_gpt2(settings["model"])
        path, config = load_path(file, gpt2), gpt2.config
        most = min(config.n_positions - 1, config.vocab_size) // 2
        if args.pairs > most:
            raise ValueError(f"--pairs takes at most {most} for {settings['model']}")
        ids = load_tokens(settings["text"], tokenizer, context)[1]
        whole = [window for window in windows(ids, context) if window.shape[1] == context]
        hit = torch.cat([hits(window, prompt) for window in whole])     # (windows, T - prompt)
        losses = losses_after(gpt2, whole, prompt, readers(path, ids[None, :prompt]))
        losses["path throughout"] = own_losses(path, whole, prompt)
        print(f"{file}: {prompt} tokens of prompt, nats a token of the rest of each window; "
              f"{hit.float().mean():.1%} are hits\n")
        show(hit_rows(losses, hit), HIT_COLUMNS)
        print(f"{file}: {args.pairs} pairs of random tokens, one to look up\n")
        show(lookup_rows(path, args.pairs), LOOKUP_COLUMNS)


if __name__ == "__main__":
    command(main)
