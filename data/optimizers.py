"""The optimizers of train_oracle.py, and their state as tensors, so that a run can be resumed."""

import torch


def new_optimizers(oracles):
    """Muon (Jordan et al. 2024) for the matrices that make the features, scaled so that AdamW's
    learning rate serves both; AdamW for the rest."""
    parameters = dict(oracles.named_parameters())
    muon = [p for name, p in parameters.items() if p.ndim == 2 and "readouts" not in name]
    adam = [p for name, p in parameters.items() if p.ndim == 1 or "readouts" in name]
    return [torch.optim.AdamW(adam, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
            torch.optim.Muon(muon, weight_decay=0.0, ns_steps=3, adjust_lr_fn="match_rms_adamw")]


def update(optimizers, lr):
    """One step of all of them at that learning rate; the gradients are gone then."""
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()


def optimizer_tensors(module, optimizers):
    """The optimizers' state as named tensors, for a safetensors file: nothing is ever pickled."""
    return {f"optimizer.{key}.{name}": value for name, p in module.named_parameters()
            for optimizer in optimizers for key, value in optimizer.state.get(p, {}).items()}


def restore_optimizers(module, optimizers, tensors):
    """The reverse of optimizer_tensors."""
    for name, p in module.named_parameters():
        for optimizer in optimizers:
            if any(p is q for group in optimizer.param_groups for q in group["params"]):
                optimizer.state[p] = {full.split(".")[1]: tensor.to(p.device, copy=True)
                                      for full, tensor in tensors.items()
                                      if full.startswith("optimizer.")
                                      and full.split(".", 2)[2] == name}
