"""GPT-2 and the oracle once more, in NumPy and float64 and one token at a time: what model.py and
oracle.py are held against.

It shares no code and no shortcut with them: no batch, no cache, no mask (a token is only shown what
it may see), no kernels. `w` is {name: array} with Hugging Face's names and shapes: matrices
(in, out), no `transformer.` in front.
"""

import numpy as np


def random_weights(vocab_size, n_positions, n_embd, n_layer, n_inner=None, seed=0):
    """Every parameter random, large enough for logits that tell errors apart."""
    C, inner = n_embd, n_inner or 4 * n_embd
    shapes = {"wte.weight": (vocab_size, C), "wpe.weight": (n_positions, C),
              "ln_f.weight": (C,), "ln_f.bias": (C,)}
    for i in range(n_layer):
        for name, shape in (("ln_1", (C,)), ("attn.c_attn", (C, 3 * C)), ("attn.c_proj", (C, C)),
                            ("ln_2", (C,)), ("mlp.c_fc", (C, inner)), ("mlp.c_proj", (inner, C))):
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[-1:]}
    random = np.random.default_rng(seed)
    return {name: random.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def arrays(module):
    """The weights of a PyTorch module as `w`."""
    return {name.replace("blocks.", "h.", 1): (t if t.ndim < 2 or name.startswith("w") else t.T)
            .detach().double().numpy() for name, t in module.state_dict().items()}


def normalise(x, eps):
    centred = x - x.mean()
    return centred / np.sqrt((centred ** 2).mean() + eps)


def layer_norm(x, w, name, eps):
    """x (T, C)"""
    return np.stack([normalise(row, eps) for row in x]) * w[name + ".weight"] + w[name + ".bias"]


def linear(x, w, name):
    return x @ w[name + ".weight"] + w[name + ".bias"]


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3)))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def log_softmax(x):
    """x (T, V)"""
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def attention(qkv, n_head):
    """qkv (T, 3C) -> (T, C): each head mixes the values of this and earlier tokens by how well
    their keys fit."""
    T, C = len(qkv), qkv.shape[1] // 3
    D = C // n_head
    y = np.zeros((T, C))
    for h in range(n_head):
        q, k, v = (qkv[:, part * C + h * D:part * C + (h + 1) * D] for part in range(3))
        for t in range(T):
            y[t, h * D:(h + 1) * D] = softmax(k[:t + 1] @ q[t] / np.sqrt(D)) @ v[:t + 1]
    return y


def block(x, w, i, n_head, eps):
    """x (T, C) -> (T, C) by block i of w."""
    h = f"h.{i}."
    qkv = linear(layer_norm(x, w, h + "ln_1", eps), w, h + "attn.c_attn")
    x = x + linear(attention(qkv, n_head), w, h + "attn.c_proj")
    inner = gelu(linear(layer_norm(x, w, h + "ln_2", eps), w, h + "mlp.c_fc"))
    return x + linear(inner, w, h + "mlp.c_proj")


def oracle_states(w, x, n_head):
    """The states that an oracle predicts from x (T, C), each (T, C)."""
    rows, features = [normalise(row, 1e-5) for row in x], []
    for t, row in enumerate(rows):
        before = rows[t - 1] if t else np.zeros_like(row)
        features.append(linear(np.concatenate([row, before]), w, "down"))
    features, i = np.stack(features), 0
    while f"h.{i}.ln_1.weight" in w:
        features, i = block(features, w, i, n_head, 1e-5), i + 1
    features, states = layer_norm(features, w, "ln", 1e-5), []
    while (r := f"readouts.{len(states)}.") + "scale" in w:
        y = x * w[r + "scale"] + linear(features, w, r + "up") * w[r + "std"]
        y[0] = y[0] + w[r + "pos0"]
        states.append(y)
    return states


def numpy_logits(w, ids, n_head, eps=1e-5, oracles=(), jumped=0, seen=True):
    """ids: T token ids -> logits (T, V).

    oracles: (span, weights or {} for none, heads). Behind each block of a span the states of the
    first `jumped` tokens are the oracle's; with seen=False these are hidden from later ones there.
    """
    w = {name: np.asarray(array, np.float64) for name, array in w.items()}
    x = np.stack([w["wte.weight"][token] + w["wpe.weight"][t] for t, token in enumerate(ids)])
    i, coming = 0, []
    while f"h.{i}.ln_1.weight" in w:
        for span, its, heads in oracles if jumped else ():
            if i == span.start:
                early = x[:jumped]
                coming = oracle_states(its, early, heads) if its else [early] * len(span)
        if not coming:
            x = block(x, w, i, n_head, eps)
        elif jumped < len(x):
            late = block(x, w, i, n_head, eps)[jumped:] if seen else \
                block(x[jumped:], w, i, n_head, eps)
            x = np.concatenate([coming.pop(0), late])
        else:
            x = coming.pop(0)
        i += 1
    return layer_norm(x, w, "ln_f", eps) @ w["wte.weight"].T


def numpy_losses(logits, targets):
    """logits (T, V), targets (T,) -> T losses in nats"""
    logs = log_softmax(logits.double().numpy())
    return [-logs[t, target] for t, target in enumerate(targets.tolist())]
