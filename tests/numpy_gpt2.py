"""GPT-2 once more, in NumPy and float64 and one token at a time: the reference that model.py is held against.

It shares no code and no shortcut with model.py: no batch, no mask (a token is only shown what it may see), no kernels.
`w` is {name: array} with Hugging Face's names and shapes: matrices (in, out), no `transformer.` in front.
"""

import numpy as np


def random_weights(vocab_size, n_positions, n_embd, n_layer, n_inner=None, seed=0):
    """Every parameter random, biases and layer norms included, and large enough for logits that tell errors apart."""
    C, I = n_embd, n_inner or 4 * n_embd
    shapes = {"wte.weight": (vocab_size, C), "wpe.weight": (n_positions, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
    for i in range(n_layer):
        for name, shape in (("ln_1", (C,)), ("attn.c_attn", (C, 3 * C)), ("attn.c_proj", (C, C)),
                            ("ln_2", (C,)), ("mlp.c_fc", (C, I)), ("mlp.c_proj", (I, C))):
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[-1:]}
    random = np.random.default_rng(seed)
    return {name: random.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def layer_norm(x, w, name, eps):
    centred = x - x.mean()
    return centred / np.sqrt((centred ** 2).mean() + eps) * w[name + ".weight"] + w[name + ".bias"]


def linear(x, w, name):
    return x @ w[name + ".weight"] + w[name + ".bias"]


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3)))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def attention(qkv, n_head):
    """qkv (T, 3C) -> (T, C): each head mixes the values of this and earlier tokens by how well their keys fit."""
    T, C = len(qkv), qkv.shape[1] // 3
    D = C // n_head
    y = np.zeros((T, C))
    for h in range(n_head):
        q, k, v = (qkv[:, part * C + h * D:part * C + (h + 1) * D] for part in range(3))
        for t in range(T):
            y[t, h * D:(h + 1) * D] = softmax(k[:t + 1] @ q[t] / np.sqrt(D)) @ v[:t + 1]
    return y


def numpy_logits(w, ids, n_head, eps=1e-5):
    """ids: T token ids -> logits (T, V)"""
    w = {name: np.asarray(array, np.float64) for name, array in w.items()}
    x = np.stack([w["wte.weight"][token] + w["wpe.weight"][t] for t, token in enumerate(ids)])
    i = 0
    while f"h.{i}.ln_1.weight" in w:
        h = f"h.{i}."
        qkv = np.stack([linear(layer_norm(row, w, h + "ln_1", eps), w, h + "attn.c_attn") for row in x])
        x = x + linear(attention(qkv, n_head), w, h + "attn.c_proj")
        inner = np.stack([gelu(linear(layer_norm(row, w, h + "ln_2", eps), w, h + "mlp.c_fc")) for row in x])
        x = x + linear(inner, w, h + "mlp.c_proj")
        i += 1
    return np.stack([layer_norm(row, w, "ln_f", eps) for row in x]) @ w["wte.weight"].T
