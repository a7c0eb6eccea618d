#!/usr/bin/env python3
"""Records which rows of the KV cache NVIDIA's kvpress keeps: every press that has a counterpart among our recipes.

The presses are the package's own code. Compression acts after a layer's attention, so all presses of one prompt see
the same keys, values and hidden states: one forward pass per attention implementation feeds them all through
`compress`, as kvpress' own forward hook does (`check_hook` compares with a run under that hook). KVzip reads the
prompt again and runs by itself, without a chat template (no prefix, suffix "\\n").

Near-ties: the presses run once in float32 (the lists recorded) and once in float64 throughout. The largest difference
of a head's scores between the two, in logarithms where scores are positive, is the rounding noise of one float32
evaluation. A kept position within BAND times that of the best one dropped, and a dropped one within as much of the
worst one kept, may fall the other way in another float32 program and is listed as `near`. Ratios at which a press
would have to choose among equal scores (fewer rows than its window) are left out.

NAME.json describes the recording; NAME.bin holds, for every record in order, for every recorded layer and KV head:
bitmap of kept positions (or channels), bit i of byte i / 8; float32 lowest score kept and highest score dropped;
float32 noise; uint16 count of near positions; those positions as uint16. Little-endian, no padding.

Usage: python make_kvpress_goldens.py DIRECTORY_WITH_SMOLLM2_GGUF [NAME...]   (packages: requirements-kvpress.txt)
"""
import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import pathlib
import struct
import sys
import types

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvpress
from kvpress.presses import kvzip_press

import real_models
import tiny_models

OUT = pathlib.Path(__file__).resolve().parent / "kvpress"
BAND = 16.0


@dataclasses.dataclass
class Entry:
    name: str            # method as our recipes call it, and the variant
    make: object         # ratio -> press
    ratios: tuple
    positive: bool = True  # scores are positive, so noise is relative

    def press(self, ratio):
        return self.make(ratio)


def parameters(press):
    """Every setting of a press, that of the wrapped one included: the package's defaults, written out."""
    out = {}
    for f in dataclasses.fields(press):
        value = getattr(press, f.name)
        if f.name not in ("compression_ratio", "key_channel_compression_ratio", "compression_ratios"):
            out[f.name] = {"class": type(value).__name__, **parameters(value)} if dataclasses.is_dataclass(value) else value
    return out


def entries(small):
    """`small`: the tiny models, where a record costs little: more ratios and parameters away from the defaults."""
    k = kvpress
    some = (0.1, 0.25, 0.37, 0.5, 0.75, 0.9) if small else (0.25, 0.5, 0.75)
    window = (0.1, 0.25, 0.37, 0.5, 0.75, 0.8) if small else some
    few = (0.25, 0.5, 0.75)
    table = [
        Entry("streaming", lambda r: k.StreamingLLMPress(r), some),
        Entry("tova", lambda r: k.TOVAPress(r), some),
        Entry("snapkv", lambda r: k.SnapKVPress(r), window),
        Entry("pyramidkv", lambda r: k.PyramidKVPress(r), window),
        Entry("observed_attention", lambda r: k.ObservedAttentionPress(r), some),
        Entry("expected_attention", lambda r: k.ExpectedAttentionPress(r), some),
        Entry("keydiff", lambda r: k.KeyDiffPress(r), some, False),
        Entry("knorm", lambda r: k.KnormPress(r), some, False),
        Entry("adakv_snapkv", lambda r: k.AdaKVPress(k.SnapKVPress(r)), window),
        Entry("adakv_expected_attention", lambda r: k.AdaKVPress(k.ExpectedAttentionPress(r, epsilon=1e-2)), some),
        Entry("kvzip", lambda r: k.KVzipPress(r), some),
        Entry("think", lambda r: k.ThinKPress(r), (0.25, 0.4, 0.5, 0.75) if small else few),
    ]
    if small:
        table += [
            Entry("streaming_sink16", lambda r: k.StreamingLLMPress(r, n_sink=16), few),
            Entry("snapkv_w32_k7", lambda r: k.SnapKVPress(r, window_size=32, kernel_size=7), few),
            Entry("pyramidkv_w8_beta5", lambda r: k.PyramidKVPress(r, window_size=8, beta=5), few),
            Entry("expected_attention_mean", lambda r: k.ExpectedAttentionPress(r, use_covariance=False), few),
            Entry("expected_attention_future64_no_vnorm",
                  lambda r: k.ExpectedAttentionPress(r, n_future_positions=64, use_vnorm=False), few),
            Entry("keydiff_block128", lambda r: k.BlockPress(k.KeyDiffPress(r), block_size=128), few, False),
            Entry("adakv_snapkv_safe50", lambda r: k.AdaKVPress(k.SnapKVPress(r), alpha_safeguard=0.5), few),
            Entry("adakv_snapkv_safe0", lambda r: k.AdaKVPress(k.SnapKVPress(r), alpha_safeguard=0.0), few),
            Entry("adakv_expected_attention_eps0", lambda r: k.AdaKVPress(k.ExpectedAttentionPress(r)), few),
            Entry("kvzip_layerwise", lambda r: k.KVzipPress(r, layerwise=True), few),
            Entry("kvzip_plus", lambda r: k.KVzipPress(r, kvzip_plus_normalization=True), few),
            Entry("kvzip_chunk150", lambda r: k.KVzipPress(r, chunk_size=150), few),
        ]
    return table


def mask_of(before, after):
    """Which rows of `before` [1, heads, n, d] are in `after`. Rotated keys of different positions are never equal."""
    mask = torch.zeros(before.shape[1:3], dtype=torch.bool)
    for h in range(before.shape[1]):
        rows = {row.numpy().tobytes() for row in after[0, h]}
        mask[h] = torch.tensor([row.numpy().tobytes() in rows for row in before[0, h]])
        assert int(mask[h].sum()) == after.shape[2], "equal keys at different positions"
    return mask


def mask_without(pruned, heads, n):
    mask = torch.ones(heads, n, dtype=torch.bool)
    mask[pruned[1], pruned[2]] = False
    return mask


def scorer_of(press):
    return press.press if hasattr(press, "press") else press


def compress(press, module, hidden, keys, values, attentions, kwargs):
    """kvpress' answer for a layer: (mask of what stays [heads, n or channels], scores [heads, n or channels])."""
    if isinstance(press, kvpress.ThinKPress):
        after, _ = press.compress(module, hidden, keys.clone(), values, attentions, kwargs)
        queries = press.compute_window_queries(module, hidden, kwargs["position_embeddings"])
        heads = keys.shape[1]
        q2 = queries.pow(2).mean(2).view(1, heads, -1, keys.shape[-1]).mean(2)
        return ~(after == 0).all(dim=2)[0], (q2 * keys.pow(2).mean(2))[0]
    captured = []
    scorer = scorer_of(press)
    original = scorer.score

    def capture(*args):
        scores = original(*args)
        captured.append(scores.clone())
        return scores

    scorer.score = capture
    module.masked_key_indices = None
    after, _ = press.compress(module, hidden, keys.clone(), values.clone(), attentions, kwargs)
    scorer.score = original
    heads, n = keys.shape[1:3]
    if module.masked_key_indices is not None:
        mask = mask_without(module.masked_key_indices, heads, n)
        module.masked_key_indices = None
    else:
        mask = mask_of(keys, after)
    # BlockPress scores piece by piece; only the last piece shows the final cut, so it has no list of scores.
    return mask, captured[0][0] if len(captured) == 1 else None


def run_presses(model, ids, wanted):
    """{(entry name, ratio): [(mask, scores) of every layer]} of one forward pass."""
    found = {(e.name, r): [] for e in wanted for r in e.ratios}

    def hook(module, _, kwargs, output):
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        for e in wanted:
            for r in e.ratios:
                found[e.name, r].append(compress(e.press(r), module, kwargs["hidden_states"], layer.keys, layer.values,
                                                 output[1], kwargs))
        return output

    hooks = []
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
        hooks.append(layer.self_attn.register_forward_hook(hook, with_kwargs=True))
    with torch.no_grad():
        model.model(input_ids=torch.tensor([ids]), past_key_values=DynamicCache())
    for h in hooks:
        h.remove()
    return found


class PlainTokenizer:
    """What KVzip asks of a tokenizer, for a model without chat template."""
    chat_template = None

    def __init__(self, encode):
        self.encode_text = encode

    def encode(self, text, return_tensors, add_special_tokens):
        return torch.tensor([self.encode_text(text)], dtype=torch.long)


def run_kvzip(model, ids, entry, tokenizer):
    """({ratio: [(mask, scores) of every layer]}, ids that were read again). Scores do not depend on the ratio, so the
    passes run once and the package's last step, `compress_post`, once per ratio."""
    kvzip_press.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda _: tokenizer)
    press = entry.press(entry.ratios[0])
    post, prepare = press.compress_post, press.prepare
    found, pairs = {}, []

    def every_ratio(model):
        for r in entry.ratios:
            press.compression_ratio = r
            post(model)
            found[r] = []
            for layer, scores in zip(model.model.layers, press.score_val):
                pruned = layer.self_attn.masked_key_indices
                found[r].append((mask_without(pruned, *scores.shape[1:]), scores[0].clone()))
                layer.self_attn.masked_key_indices = None

    def capture_prepare(*args, **kwargs):
        pairs.extend(prepare(*args, **kwargs))
        return pairs

    press.compress_post, press.prepare = every_ratio, capture_prepare
    with torch.no_grad(), press(model):
        model.model(input_ids=torch.tensor([ids]), past_key_values=DynamicCache())
    return found, [repeat[0].tolist() for _, repeat in pairs]


def run_all(model, ids, table, tokenizer):
    """As run_presses, and the ids that KVzip reads again per entry."""
    def use(implementation):
        model.set_attn_implementation(implementation)

    eager = [e for e in table if e.name == "observed_attention"]
    kvzip = [e for e in table if e.name.startswith("kvzip")]
    rest = [e for e in table if e not in eager and e not in kvzip]
    use("eager")
    found = run_presses(model, ids, eager)
    use("sdpa")
    found.update(run_presses(model, ids, rest))
    repeats = {}
    for e in kvzip:
        by_ratio, repeats[e.name] = run_kvzip(model, ids, e, tokenizer)
        found.update({(e.name, r): layers for r, layers in by_ratio.items()})
    return found, repeats


@contextlib.contextmanager
def all_double(model):
    """The model in float64, including what transformers and kvpress pin to float32: norms, softmax, rotary angles."""
    rotary = model.model.rotary_emb
    assert model.config.rope_parameters["rope_type"] == "default"
    d = rotary.inv_freq.shape[0] * 2
    frequency = float(model.config.rope_parameters["rope_theta"]) ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)

    def angles(x, position_ids):
        a = position_ids[..., None].double() * frequency
        a = torch.cat((a, a), dim=-1)
        return a.cos(), a.sin()

    single, forward = torch.float32, rotary.forward
    model.double()
    rotary.forward, torch.float32 = angles, torch.float64
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(single)
        rotary.forward, torch.float32 = forward, single
        model.float()


def check_hook(model, ids, table):
    """The shortcut of run_presses against the package's own use: `with press(model)`, one press at a time."""
    model.set_attn_implementation("sdpa")
    for e in table:
        if e.name in ("observed_attention", "think") or e.name.startswith("kvzip"):
            continue
        r = 0.5
        fast = run_presses(model, ids, [dataclasses.replace(e, ratios=(r,))])[e.name, r]
        full, cache = DynamicCache(), DynamicCache()
        with torch.no_grad():
            model.model(input_ids=torch.tensor([ids]), past_key_values=full)
            with e.press(r)(model):
                model.model(input_ids=torch.tensor([ids]), past_key_values=cache)
        for i, layer in enumerate(model.model.layers):
            pruned = getattr(layer.self_attn, "masked_key_indices", None)
            keys = full.layers[i].keys
            own = mask_without(pruned, *keys.shape[1:3]) if pruned is not None else mask_of(keys, cache.layers[i].keys)
            layer.self_attn.masked_key_indices = None
            assert torch.equal(own, fast[i][0]), (e.name, i)


def shared_by(entry, press):
    """Whose rows compete: one head's, those of all heads of a layer, or those of the whole model."""
    if entry.name.startswith("kvzip") and not press.layerwise:
        return "model"
    return "layer" if entry.name.startswith(("adakv", "kvzip")) else "head"


def cut_groups(entry, press, layers):
    """The (layer, head) pairs that share a cut, group by group."""
    pairs = [[(l, h) for h in range(len(layers[0][0]))] for l in range(len(layers))]
    share = shared_by(entry, press)
    if share == "layer":
        return pairs
    flat = [pair for layer in pairs for pair in layer]
    return [flat] if share == "model" else [[pair] for pair in flat]


def spread(scores, positive):
    scores = scores.double()
    return scores.clamp(min=1e-300).log() if positive else scores


def near_lists(entry, press, single, double):
    """{(layer, head): (lowest kept, highest dropped, noise, near positions)}."""
    out = {}
    if single[0][1] is None:
        # Block by block: the positions on which float32 and float64 disagree, and a noise that says "not known".
        return {(l, h): (np.nan, np.nan, np.nan, torch.nonzero(m[h] != double[l][0][h]).flatten().tolist())
                for l, (m, _) in enumerate(single) for h in range(len(m))}
    for group in cut_groups(entry, press, single):
        s32 = torch.stack([spread(single[l][1][h], entry.positive) for l, h in group])
        s64 = torch.stack([spread(double[l][1][h], entry.positive) for l, h in group])
        mask = torch.stack([single[l][0][h] for l, h in group])
        noise = (s32 - s64).abs().max(dim=1).values
        band = BAND * noise.max()
        best_dropped = torch.where(mask, -torch.inf, s64).max()
        # Rows that only a head's safeguard keeps lie below the joint cut; each such head has a cut of its own.
        worst_kept = torch.where(mask & (s64 >= best_dropped - band), s64, torch.inf).min()
        near = torch.where(mask, (s64 - best_dropped).abs() <= band, s64 >= worst_kept - band)
        if entry.name.startswith("adakv"):
            n_safe = int(int(mask.sum()) // len(group) * press.alpha_safeguard)
            for h in range(len(group)):
                if 0 < n_safe == int(mask[h].sum()):
                    own_kept, own_dropped = s64[h][mask[h]].min(), s64[h][~mask[h]].max()
                    near[h] |= torch.where(mask[h], s64[h] <= own_dropped + band, s64[h] >= own_kept - band)
        for i, (l, h) in enumerate(group):
            m, s = single[l][0][h], single[l][1][h].double()
            low = float(s[m].min()) if m.any() else np.nan
            high = float(s[~m].max()) if (~m).any() else np.nan
            rows = torch.nonzero(near[i]).flatten().tolist()
            changed = torch.nonzero(m != double[l][0][h]).flatten().tolist()
            assert set(changed) <= set(rows), (entry.name, l, h, changed, rows)
            out[l, h] = (low, high, float(noise[i]), rows)
    return out


def pack(mask, low, high, noise, near):
    bits = np.packbits(mask.numpy(), bitorder="little").tobytes()
    return bits + struct.pack("<fffH", low, high, noise, len(near)) + np.array(near, "<u2").tobytes()


class Recording:
    def __init__(self, name, model, config):
        heads = config.num_attention_heads
        self.name = name
        self.blob = bytearray()
        self.meta = {
            "format": 1, "model": model, "layers": config.num_hidden_layers, "query_heads": heads,
            "kv_heads": config.num_key_value_heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "band": BAND,
            "versions": {p: importlib.metadata.version(p) for p in ("kvpress", "transformers")} |
                        {"torch": torch.__version__},
            "cases": [],
        }

    def add(self, case, ids, table, layers, single, double, repeats):
        out = {"name": case, "ids": [int(i) for i in ids], "layers": layers, "records": []}
        heads = range(self.meta["kv_heads"])
        for e in table:
            press = e.press(e.ratios[0])
            record = {"name": e.name, "press": type(press).__name__, "parameters": parameters(press),
                      "units": "channels" if e.name == "think" else "positions",
                      "cut": shared_by(e, press), "ratios": e.ratios, "offsets": []}
            if e.name in repeats:
                record["repeat_ids"] = repeats[e.name]
            for r in e.ratios:
                found = single[e.name, r]
                near = near_lists(e, press, found, double[e.name, r])
                record["offsets"].append(len(self.blob))
                for l in layers:
                    for h in heads:
                        self.blob += pack(found[l][0][h], *near[l, h])
                written = [near[l, h] for l in layers for h in heads]
                print(f"{self.name} {case} {e.name:36} {r:4}  near {sum(len(w[3]) for w in written):5}  "
                      f"noise {max(w[2] for w in written):.1e}", flush=True)
            out["records"].append(record)
        self.meta["cases"].append(out)

    def write(self):
        OUT.mkdir(exist_ok=True)
        text = json.dumps(self.meta, separators=(",", ":"))
        (OUT / f"{self.name}.json").write_text(text + "\n", encoding="utf-8")
        (OUT / f"{self.name}.bin").write_bytes(bytes(self.blob))
        print(self.name, len(text), "+", len(self.blob), "bytes")


def tiny(name):
    """The random model of tests/golden/models/NAME.gguf, checked against that file."""
    family, given, _ = tiny_models.MODELS[name]
    config_class, model_class, arch = tiny_models.FAMILIES[family]
    config = config_class(**given, bos_token_id=256, eos_token_id=257, pad_token_id=None)
    model = model_class(config).float().eval()
    tiny_models.randomize(model, list(tiny_models.MODELS).index(name) + 1)
    reader = gguf.GGUFReader(str(tiny_models.golden_io.HERE / f"{name}.gguf"))
    stored = {t.name: t.data for t in reader.tensors}
    for tensor, value in tiny_models.tensors_of(family, arch, config, model):
        assert np.array_equal(stored[tensor].reshape(value.shape), value), (name, tensor)
    return model


def record(recording, model, cases, tokenizer, small):
    for case, ids, layers, keep in cases:
        table = [dataclasses.replace(e, ratios=keep) if keep else e for e in entries(small)]
        if small:
            check_hook(model, ids, table)
        single, repeats = run_all(model, ids, table, tokenizer)
        with all_double(model):
            double, _ = run_all(model, ids, table, tokenizer)
        recording.add(case, ids, table, layers, single, double, repeats)
    recording.write()


def main():
    directory = pathlib.Path(sys.argv[1])
    wanted = sys.argv[2:] or ["llama", "qwen3", "smollm2-q4_1"]
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("kvpress").setLevel(logging.ERROR)  # KVzip announces its cost once per press
    for name in wanted:
        if name in tiny_models.MODELS:
            model = tiny(name)
            n = model.config.num_hidden_layers
            # No text: random tokens, so that heads do not agree, with the repeats that chance brings (equal norms).
            ids = [256] + np.random.default_rng(7).integers(0, 256, 395).tolist()
            record(Recording(name, f"{name}.gguf", model.config), model, [("random", ids, list(range(n)), None)],
                   PlainTokenizer(lambda text: list(text.encode())), True)
        if name == "smollm2-q4_1":
            file = "SmolLM2-135M-Instruct.Q4_1.gguf"
            model = AutoModelForCausalLM.from_pretrained(str(directory), gguf_file=file, dtype=torch.float32).eval()
            words = AutoTokenizer.from_pretrained(str(directory), gguf_file=file)
            encode = lambda text: words(text, add_special_tokens=False)["input_ids"]
            text = "\n".join([real_models.STORY] + real_models.TEXT_PROMPTS + real_models.NEEDLE_PROMPTS)
            ids = encode(text)
            assert len(ids) >= 1000, len(ids)
            cases = [("story", ids[:333], list(range(30)), None), ("long", ids[:1000], [0, 1, 8, 15, 22, 29], (0.37, 0.9))]
            record(Recording(name, file, model.config), model, cases, PlainTokenizer(encode), False)


if __name__ == "__main__":
    main()
