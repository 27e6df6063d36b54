#!/usr/bin/env python3
"""Writes minilm_reference.json: sentence embeddings of all-MiniLM-L6-v2 by plain Python in doubles.

    python3 tests/data/reference_embedding.py > tests/data/minilm_reference.json

Shares nothing with the crate: it reads the safetensors file by itself and has no dependencies. The token
ids are given, not computed, so that the tokeniser is checked by the ids too. Takes a minute or two.
"""
import json
import math
import operator
import pathlib
import struct
import sys
from array import array

FOLDER = pathlib.Path(__file__).parent.parent / "models" / "all-MiniLM-L6-v2"

CASES = [
    ("That is a happy person", [101, 2008, 2003, 1037, 3407, 2711, 102]),
    (
        "Weights that do not fit on the card are brought there page by page, "
        "just before the layer that needs them runs, and make room for the next ones after it.",
        [101, 15871, 2008, 2079, 2025, 4906, 2006, 1996, 4003, 2024, 2716, 2045, 3931, 2011, 3931, 1010,
         2074, 2077, 1996, 6741, 2008, 3791, 2068, 3216, 1010, 1998, 2191, 2282, 2005, 1996, 2279, 3924,
         2044, 2009, 1012, 102],
    ),
]

with open(FOLDER / "model.safetensors", "rb") as file:
    (length,) = struct.unpack("<Q", file.read(8))
    header = json.loads(file.read(length))
    data = file.read()
config = json.loads((FOLDER / "config.json").read_text())


def rows(name):
    """A tensor as a list of rows of doubles; a vector is one row."""
    info = header[name]
    assert info["dtype"] == "F32", name
    begin, end = info["data_offsets"]
    flat = array("f")
    flat.frombytes(data[begin:end])
    if sys.byteorder == "big":
        flat.byteswap()
    width = info["shape"][-1]
    return [array("d", flat[at:at + width]) for at in range(0, len(flat), width)]


def dot(a, b):
    return sum(map(operator.mul, a, b))


def linear(x, name):
    weight, (bias,) = rows(name + ".weight"), rows(name + ".bias")
    return [[dot(row, out) + b for out, b in zip(weight, bias)] for row in x]


def layer_norm(x, name):
    (weight,), (bias,) = rows(name + ".weight"), rows(name + ".bias")
    result = []
    for row in x:
        mean = math.fsum(row) / len(row)
        variance = math.fsum((v - mean) ** 2 for v in row) / len(row)
        scale = 1 / math.sqrt(variance + config["layer_norm_eps"])
        result.append([(v - mean) * scale * w + b for v, w, b in zip(row, weight, bias)])
    return result


def add(a, b):
    return [[p + q for p, q in zip(x, y)] for x, y in zip(a, b)]


def attention(x, layer):
    q, k, v = (linear(x, f"{layer}.attention.self.{part}") for part in ("query", "key", "value"))
    heads = config["num_attention_heads"]
    width = config["hidden_size"] // heads
    result = [[] for _ in x]
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        values = list(zip(*(row[part] for row in v)))
        for at, query in enumerate(q):
            scores = [dot(query[part], key[part]) / math.sqrt(width) for key in k]
            top = max(scores)
            powers = [math.exp(score - top) for score in scores]
            total = math.fsum(powers)
            shares = [power / total for power in powers]
            result[at].extend(dot(shares, column) for column in values)
    return result


def embed(ids):
    words = rows("embeddings.word_embeddings.weight")
    places = rows("embeddings.position_embeddings.weight")
    kind = rows("embeddings.token_type_embeddings.weight")[0]
    x = [[w + p + t for w, p, t in zip(words[token], places[at], kind)] for at, token in enumerate(ids)]
    x = layer_norm(x, "embeddings.LayerNorm")
    for number in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{number}"
        mixed = linear(attention(x, layer), f"{layer}.attention.output.dense")
        x = layer_norm(add(mixed, x), f"{layer}.attention.output.LayerNorm")
        inner = linear(x, f"{layer}.intermediate.dense")
        inner = [[v / 2 * (1 + math.erf(v / math.sqrt(2))) for v in row] for row in inner]
        x = layer_norm(add(linear(inner, f"{layer}.output.dense"), x), f"{layer}.output.LayerNorm")
    mean = [math.fsum(column) / len(x) for column in zip(*x)]
    norm = math.sqrt(math.fsum(v * v for v in mean))
    return [v / norm for v in mean]


json.dump(
    {
        "made_by": "tests/data/reference_embedding.py, plain Python in doubles, from the model's own file",
        "cases": [
            {"sentence": text, "ids": ids, "embedding": [round(v, 9) for v in embed(ids)]}
            for text, ids in CASES
        ],
    },
    sys.stdout,
    indent=1,
)
print()
