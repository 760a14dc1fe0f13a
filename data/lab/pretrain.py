"""Trains the mini model in data/mini/ from nothing:

    pip install tokenizers && python -m data.lab.pretrain --out my-mini

12 blocks of width 192, trained on the documentation strings of the installed packages
(data/corpus.py), half of the windows with a passage in them twice. The matrices inside the blocks
are trained with Muon (Jordan et al. 2024), everything else with AdamW. Held-out figures are printed
on the way. Started again after it was cut, it goes on from its last checkpoint. It ends by writing
Hugging Face's layout.
"""

import argparse
import json
import math
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch.nn import functional as F

from data.cli import Parser, command, positive, seed
from data.corpus import load_text, load_tokens, training_windows
from data.files import save_tensors
from data.hub import read_metadata, read_tensors
from data.optimizers import optimizer_tensors, restore_optimizers
from data.tokenizer import EOT, load_tokenizer
from eval_ppl import evaluate
from model import GPT2, GPT2Config
from oracle import no_oracle

CONFIG = GPT2Config(vocab_size=4096, n_positions=256, n_embd=192, n_layer=12, n_head=6)
MUON_LR, ADAM_LR, WEIGHT_DECAY = 3e-3, 1e-2, 0.1
WARM_UP, COOL_DOWN = 100, 0.7   # steps; share of the run in which the learning rate falls to zero
SAVE_EVERY = 250                # steps


def train_tokenizer(directory):
    """A byte-level BPE in GPT-2's order: 256 bytes, merges by rank, end-of-text last."""
    from tokenizers import ByteLevelBPETokenizer  # needed here alone, so not in requirements.txt
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(load_text("docs")[0], vocab_size=CONFIG.vocab_size - 1,
                            show_progress=False)
    bpe.save_model(str(directory))
    vocab = bpe.get_vocab()
    vocab[EOT] = len(vocab)
    in_order = dict(sorted(vocab.items(), key=lambda item: item[1]))
    (directory / "vocab.json").write_text(json.dumps(in_order), encoding="utf-8")


def new_model(seed):
    """GPT-2's initialisation: normal of deviation 0.02, smaller for the matrices that add to the
    residual stream."""
    torch.manual_seed(seed)
    model = GPT2(CONFIG)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            shrink = math.sqrt(2 * CONFIG.n_layer) if "c_proj" in name else 1
            torch.nn.init.normal_(p, std=0.02 / shrink)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(p)
    return model


def learning_rate(step, steps):
    """Share of the full learning rate: warm-up, plateau, linear cool-down to zero."""
    return min(1, (step + 1) / WARM_UP, (steps - step) / (COOL_DOWN * steps))


def heldout_loss(model, ids):
    figures = evaluate({"full model": no_oracle(model, [])}, ids, CONFIG.n_positions)
    return math.log(figures["full model"]["ppl"])


@torch.no_grad()
def copying(model, ids):
    """Nats a token of a held-out passage of 48 tokens the first time, when it comes again 80 tokens
    later (its last 40), and of 60 random tokens that come again (from the 8th on).

    The numbers are those of a context of 256 tokens; they shrink with it.
    """
    T = CONFIG.n_positions
    start, again, n = T // 4, T * 3 // 4, T * 3 // 16               # 64, 192, 48
    text = ids[:len(ids) // T * T].view(-1, T)[:192].clone()        # (B, T)
    text[:, again:again + n] = text[:, start:start + n]
    noise = torch.randint(CONFIG.vocab_size - 1, (64, n * 5 // 4),
                          generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    seen, half, losses = n // 6, noise.shape[1] // 2, []
    for window, first, last in ((text, start + seen, start + n), (text, again + seen, again + n),
                                (noise, half + seen, 2 * half)):
        logits = torch.cat([model(part)[:, first - 1:last - 1] for part in window.split(32)])
        targets = window[:, first:last].flatten()
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets).item())
    return losses


def show_copying(losses):
    return "copying: passage {:.3f}, again {:.3f}, random tokens again {:.3f}".format(*losses)


def write_hugging_face(model, directory):
    """config.json and model.safetensors in float16, with GPT-2's names and transposed matrices."""
    tensors = {name.replace("blocks.", "h."): (p.t() if ".c_" in name and p.ndim == 2 else p).half()
               for name, p in model.named_parameters()}
    save_tensors(directory / "model.safetensors", tensors, {"format": "pt"})
    eot = CONFIG.vocab_size - 1
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"],
              "activation_function": "gelu_new", **asdict(CONFIG),
              "bos_token_id": eot, "eos_token_id": eot}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=positive, default=3000, help="optimizer steps (%(default)s)")
    add("--batch-size", type=positive, default=16, help="windows a step (%(default)s)")
    add("--seed", type=seed, default=0, help="of weights and batches (%(default)s)")
    add("--out", type=Path, default=Path("my-mini"), help="directory (%(default)s)")
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "merges.txt").exists():
        train_tokenizer(args.out)
    T = CONFIG.n_positions
    train, heldout = load_tokens("docs", load_tokenizer(args.out), T)
    print(f"{len(train):,} training tokens, {len(heldout):,} held out", flush=True)

    model = new_model(args.seed)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is q for q in matrices)]
    # torch's Muon can scale its step to AdamW's, so that one kind of learning rate serves both
    muon = torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=WEIGHT_DECAY,
                            adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0)

    first, before, checkpoint = 0, 0.0, args.out / "checkpoint.safetensors"
    settings = {name: str(getattr(args, name)) for name in ("steps", "batch_size", "seed")}
    if checkpoint.exists():
        tensors, metadata = read_tensors(checkpoint), read_metadata(checkpoint)
        if metadata != {**metadata, **settings}:
            raise ValueError(f"{checkpoint} is of a run with other --steps, --batch-size or --seed:"
                             " give another --out")
        first, before = int(metadata["step"]), float(metadata["seconds"])
        restore_optimizers(model, [muon, adam], tensors)
        model.load_state_dict({n: t for n, t in tensors.items() if not n.startswith("optimizer.")})
        print(f"goes on from step {first}", flush=True)

    start, tokens, recent = time.time(), args.batch_size * T, []
    for step in range(first, args.steps):
        share = learning_rate(step, args.steps)
        for optimizer, lr in ((muon, MUON_LR), (adam, ADAM_LR)):
            optimizer.param_groups[0]["lr"] = lr * share
        window = training_windows(train, args.batch_size, T + 1, args.seed, step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(window[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad()
        recent.append(loss.item())

        done = step + 1
        if done % 50 == 0 or done % SAVE_EVERY == 0 or done == args.steps:
            seconds = time.time() - start
            left = seconds / (done - first) * (args.steps - done)
            line = (f"step {done}/{args.steps}  loss {sum(recent) / len(recent):.3f}  "
                    f"{tokens * (done - first) / seconds:,.0f} tokens/s  {left / 60:.0f} min left")
            recent = []
            if done % SAVE_EVERY == 0:
                line += (f"  held-out {heldout_loss(model, heldout[:128 * T]):.3f} (128 windows)  "
                         + show_copying(copying(model, heldout)))
                state = {**model.state_dict(), **optimizer_tensors(model, [muon, adam])}
                save_tensors(checkpoint, state, {**settings, "step": str(done),
                                                 "seconds": str(before + seconds)})
            print(line, flush=True)

    write_hugging_face(model, args.out)
    loss = heldout_loss(model, heldout)
    print(f"held-out loss {loss:.4f}, perplexity {math.exp(loss):.2f}; "
          f"{show_copying(copying(model, heldout))}; {args.steps * tokens:,} tokens "
          f"in {(before + time.time() - start) / 60:.0f} minutes")


if __name__ == "__main__":
    command(main)
