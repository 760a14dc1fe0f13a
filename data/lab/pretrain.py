"""Trains the GPT-2 that ships in data/mini/ from nothing:  pip install tokenizers && python -m data.pretrain

12 blocks of width 192, trained on the documentation strings of the installed packages (data/corpus.py). The matrices
inside the blocks are trained with Muon (Jordan et al. 2024), everything else with AdamW. Held-out loss is printed on the
way. Started again after it was cut, it goes on from its last checkpoint. It ends by writing Hugging Face's layout.
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
from data.corpus import load_text, load_tokens, sample_windows
from data.files import optimizer_tensors, restore_optimizers, save_tensors
from data.tokenizer import EOT, load_tokenizer
from eval_ppl import evaluate
from load_weights import read_metadata, read_tensors
from model import GPT2, GPT2Config

CONFIG = GPT2Config(vocab_size=4096, n_positions=256, n_embd=192, n_layer=12, n_head=6)
MUON_LR, ADAM_LR, WEIGHT_DECAY = 3e-3, 1e-2, 0.1
WARM_UP, COOL_DOWN = 100, 0.7           # steps; share of the run in which the learning rate falls to zero
SAVE_EVERY = 250                        # steps


def train_tokenizer(directory):
    """A byte-level BPE in GPT-2's order: 256 bytes, merges by rank, end-of-text last."""
    from tokenizers import ByteLevelBPETokenizer        # needed here alone, so not among the requirements
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(load_text("docs")[0], vocab_size=CONFIG.vocab_size - 1, show_progress=False)
    bpe.save_model(str(directory))
    vocab = bpe.get_vocab()
    vocab[EOT] = len(vocab)
    in_order = dict(sorted(vocab.items(), key=lambda item: item[1]))
    (directory / "vocab.json").write_text(json.dumps(in_order), encoding="utf-8")


def new_model(seed):
    """GPT-2's initialisation: normal of deviation 0.02, smaller for the matrices that add to the residual stream."""
    torch.manual_seed(seed)
    model = GPT2(CONFIG)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.02 / math.sqrt(2 * CONFIG.n_layer) if "c_proj" in name else 0.02)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(p)
    return model


def learning_rate(step, steps):
    """Share of the full learning rate: warm-up, plateau, linear cool-down to zero."""
    return min(1, (step + 1) / WARM_UP, (steps - step) / (COOL_DOWN * steps))


def heldout_loss(model, ids):
    return math.log(evaluate(model, [], ids, CONFIG.n_positions)[0]["ppl"])


def write_hugging_face(model, directory):
    """config.json and model.safetensors in float16, with the names and the transposed matrices that GPT-2's have."""
    tensors = {name.replace("blocks.", "h."): (p.t() if ".c_" in name and p.ndim == 2 else p).half()
               for name, p in model.named_parameters()}
    save_tensors(directory / "model.safetensors", tensors, {"format": "pt"})
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new",
              **asdict(CONFIG), "bos_token_id": CONFIG.vocab_size - 1, "eos_token_id": CONFIG.vocab_size - 1}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=1800, help="optimizer steps (%(default)s)")
    parser.add_argument("--batch-size", type=positive, default=16, help="windows a step (%(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help="of weights and batches (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("my-mini"), help="directory (%(default)s)")
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
    # torch's Muon can scale its step to the size that AdamW's would have, so that one kind of learning rate serves both
    muon = torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0)

    first, before, checkpoint = 0, 0.0, args.out / "checkpoint.safetensors"
    settings = {name: str(getattr(args, name)) for name in ("steps", "batch_size", "seed")}
    if checkpoint.exists():
        tensors, metadata = read_tensors(checkpoint), read_metadata(checkpoint)
        if metadata != {**metadata, **settings}:
            raise ValueError(f"{checkpoint} is of a run with other --steps, --batch-size or --seed: give another --out")
        first, before = int(metadata["step"]), float(metadata["seconds"])
        restore_optimizers(model, [muon, adam], tensors)
        model.load_state_dict({n: t for n, t in tensors.items() if not n.startswith("optimizer.")})
        print(f"goes on from step {first}", flush=True)

    start, tokens, recent = time.time(), args.batch_size * T, []
    for step in range(first, args.steps):
        share = learning_rate(step, args.steps)
        for optimizer, lr in ((muon, MUON_LR), (adam, ADAM_LR)):
            optimizer.param_groups[0]["lr"] = lr * share
        window = sample_windows(train, args.batch_size, T + 1, args.seed, step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad()
        recent.append(loss.item())

        done = step + 1
        if done % 50 == 0 or done % SAVE_EVERY == 0 or done == args.steps:
            seconds = time.time() - start
            left = seconds / (done - first) * (args.steps - done)
            line = f"step {done}/{args.steps}  loss {sum(recent) / len(recent):.3f}  " \
                   f"{tokens * (done - first) / seconds:,.0f} tokens/s  {left / 60:.0f} min left"
            recent = []
            if done % SAVE_EVERY == 0:
                line += f"  held-out {heldout_loss(model, heldout[:128 * T]):.3f} (first 128 windows)"
                save_tensors(checkpoint, {**model.state_dict(), **optimizer_tensors(model, [muon, adam])},
                             {**settings, "step": str(done), "seconds": str(before + seconds)})
            print(line, flush=True)

    write_hugging_face(model, args.out)
    loss = heldout_loss(model, heldout)
    print(f"held-out loss {loss:.4f}, perplexity {math.exp(loss):.2f}; {args.steps * tokens:,} tokens "
          f"in {(before + time.time() - start) / 60:.0f} minutes")


if __name__ == "__main__":
    command(main)
