"""A wider model that gives nearly the same answers, and whose new heads of layer 0 read the latest heading.

Two query heads and one key/value head are added to every layer. Above layer 0 they begin with no effect. In layer 0 they
begin as what the records need, because found by chance it takes long: digits, names and full stops ask for the word of a
heading, and the nearer of two wins by low rotary frequencies. What is read goes where the names before a digit go.
"""

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.vault_sections import Sections

NEW_QUERIES, NEW_KEYS = 2, 1
FREQUENCIES = ((26, 28, 30, 32), (25, 27, 29, 31))  # of the new query heads; of 64 from short to long
PHASES = (0.5, 0.4)  # radians; the scores fall from distance 0 on
SHARPNESS = 1.75  # what query and key norm count more at these frequencies
STRENGTH = 18.0  # length of the new queries and keys before their norm
NOISE = (0.03, 0.06)  # of the new queries and keys at the other frequencies
MARK = 0.5  # what is added to the embeddings of headings' words, in their mean length
SHARE = 0.25  # of what the last old query head writes
NEAR = slice(2, 12)  # high frequencies, with which prose reads what stands right before it
PLAIN = (40.0, 20.0)  # length of such queries and keys before their norm
OFTEN = 50.0  # weight of digits and full stops in the fit of who asks


@torch.no_grad()
def widened(model: Any, sections: Sections) -> Any:
    """The model with the new heads; the one given is left as it was."""
    config = copy.deepcopy(model.config)
    config.num_attention_heads += NEW_QUERIES
    config.num_key_value_heads += NEW_KEYS
    torch.manual_seed(0)
    wide, old = type(model)(config), model.state_dict()
    for name, weight in wide.named_parameters():
        if weight.shape == old[name].shape:
            weight.copy_(old[name])
        elif "o_proj" in name:
            weight.zero_()[:, : old[name].shape[1]] = old[name]
        else:
            weight.normal_(0, 0.02)[: len(old[name])] = old[name]
    read_headings(wide, sections, model.config.num_attention_heads, model.config.num_key_value_heads)
    return wide


def read_headings(model: Any, sections: Sections, queries: int, keys: int) -> None:
    """Sets the new heads of layer 0, which stand behind so many old ones."""
    layer, size = model.model.layers[0], model.config.head_dim
    attention, half = layer.self_attn, size // 2
    mark = marked(model, sections)
    asking = askers(layer.input_layernorm(model.model.embed_tokens.weight), sections)
    used = sorted({low + part for each in FREQUENCIES for low in each for part in (0, half)})
    unused = torch.tensor([i for i in range(size) if i not in used])
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight[used] *= SHARPNESS
    for weight, old in ((attention.q_proj.weight, queries), (attention.k_proj.weight, keys)):
        weight.view(-1, size, weight.shape[1])[:old, used] /= SHARPNESS
    key, pattern = attention.k_proj.weight[keys * size :], torch.zeros(size)
    pattern[[low for each in FREQUENCIES for low in each]] = 1
    key.zero_()[unused] = torch.randn(len(unused), key.shape[1]) * NOISE[1]
    key += STRENGTH * torch.outer(pattern / pattern.norm(), mark)
    out = attention.o_proj.weight.view(-1, queries + NEW_QUERIES, size)
    for i, (lows, phase) in enumerate(zip(FREQUENCIES, PHASES, strict=True)):
        query, pattern = attention.q_proj.weight[(queries + i) * size :][:size], torch.zeros(size)
        for low in lows:
            pattern[low], pattern[low + half] = math.cos(phase), math.sin(phase)
        query.zero_()[unused] = torch.randn(len(unused), query.shape[1]) * NOISE[0]
        query += STRENGTH * torch.outer(pattern / pattern.norm(), asking)
        out[:, queries + i] = SHARE * out[:, queries - 1]
    value = attention.v_proj.weight
    value[keys * size :] = value[(keys - 1) * size : keys * size]


def marked(model: Any, sections: Sections) -> Tensor:
    """Marks the embeddings of headings' words; the direction in which the normed embedding shows it as 1."""
    norm, embeddings = model.model.layers[0].input_layernorm, model.model.embed_tokens.weight
    normed, headings = norm(embeddings), torch.from_numpy(sections.headings)
    least = torch.linalg.eigh(normed.T @ normed)[1][:, 0]  # the direction that the tokens use least
    mark = torch.nn.functional.normalize(least / norm.weight, dim=0)
    embeddings[headings] += MARK * embeddings[headings].norm(dim=1).mean() * mark
    return least / (norm(embeddings[headings]) @ least).mean()


def askers(normed: Tensor, sections: Sections) -> Tensor:
    """The direction in which the normed embeddings of digits, names and full stops are 1 and the others nearly 0."""
    often = [*sections.digits, sections.stop]
    wanted, weight = torch.zeros(len(normed)), torch.ones(len(normed))
    wanted[[*often, *sections.names]] = 1
    weight[often] = OFTEN
    gram = normed.T @ (weight[:, None] * normed) + torch.eye(normed.shape[1])
    return torch.linalg.solve(gram, normed.T @ (weight * wanted))


@torch.no_grad()
def settle(model: Any, sections: Sections, louder: float) -> None:
    """Lets prose read the prose right before it with the new heads of layer 0, and what they read count so much more.

    Prose has no use for headings, but a little of them showed in its keys, and a chunk that was computed alone then
    differed everywhere, not in its records alone.
    """
    layer, size = model.model.layers[0], model.config.head_dim
    attention, queries = layer.self_attn, model.config.num_attention_heads - NEW_QUERIES
    plain = prosaic(layer.input_layernorm(model.model.embed_tokens.weight), sections)
    near = torch.zeros(size)
    near[NEAR] = len(range(size)[NEAR]) ** -0.5
    for i in range(NEW_QUERIES):
        attention.q_proj.weight[(queries + i) * size :][:size] += PLAIN[0] * torch.outer(near, plain)
    attention.k_proj.weight[-NEW_KEYS * size :] += PLAIN[1] * torch.outer(near, plain)
    attention.o_proj.weight[:, queries * size :] *= louder


def prosaic(normed: Tensor, sections: Sections) -> Tensor:
    """The direction in which the normed embeddings of prose are 1 and those of what stands in facts and headings nearly 0."""
    often = torch.from_numpy(np.bincount(sections.prose, minlength=len(normed)).astype(np.float32))
    rare = [*sections.digits, *sections.words, sections.stop, sections.vault, sections.same]
    wanted, weight = torch.ones(len(normed)), (often / often.mean()).sqrt()
    wanted[rare], weight[rare] = 0, 20
    weight += 0.05
    gram = normed.T @ (weight[:, None] * normed) + torch.eye(normed.shape[1])
    return torch.linalg.solve(gram, normed.T @ (weight * wanted))
