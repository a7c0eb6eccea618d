#!/usr/bin/env python3
"""Writes a tiny random model of every supported family, and what Hugging Face transformers computes with it.

Weights come from fixed seeds and are rounded to the stored type (f16 matrices, f32 vectors) before transformers sees
them, so both sides hold the same numbers. Attention is the eager one, everything in float32. Each model is stored as
a GGUF with the names, the order of rotary pairs and the keys that llama.cpp's converter gives the family.

Usage: python tiny_models.py [NAME...]      (needs the packages of requirements.txt)
"""
import math
import sys

import gguf
import numpy as np
import torch
from transformers import (Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Phi3Config,
                          Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

import golden_io

ARCH = gguf.MODEL_ARCH
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, ARCH.LLAMA),
    "internlm2": (LlamaConfig, LlamaForCausalLM, ARCH.INTERNLM2),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, ARCH.QWEN2),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, ARCH.QWEN3),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, ARCH.GEMMA3),
    "phi3": (Phi3Config, Phi3ForCausalLM, ARCH.PHI3),
}
PERMUTED = ("llama", "internlm2")  # rotary pairs lie next to each other in these families' files


def rope(theta, **scaling):
    return {"rope_type": "default", "rope_theta": theta, **scaling}


def ramp(n, low, high):
    return [round(low + (high - low) * i / (n - 1), 4) for i in range(n)]


def longrope(theta, head_dim, original):
    half = head_dim // 2
    return rope(theta, rope_type="longrope", original_max_position_embeddings=original,
                short_factor=ramp(half, 1.0, 1.3), long_factor=ramp(half, 1.1, 6.0))


def shape(hidden, heads, kv, layers, ff, vocab=264, **more):
    return dict(hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv, num_hidden_layers=layers,
                intermediate_size=ff, vocab_size=vocab, rms_norm_eps=1e-5, max_position_embeddings=512, **more)


# name -> (family, configuration, {case name: tokens})
MODELS = {
    "llama": ("llama", shape(64, 4, 2, 3, 160, 288, rope_parameters=rope(10000.0)), {}),
    "llama-mqa-tied": ("llama", shape(128, 8, 1, 2, 96, tie_word_embeddings=True, head_dim=16,
                                      rope_parameters=rope(500000.0)), {}),
    "llama-llama3": ("llama", shape(64, 4, 2, 2, 96, rope_parameters=rope(
        500000.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64), head_dim=16), {}),
    "llama-linear": ("llama", shape(64, 2, 1, 2, 96, rope_parameters=rope(
        10000.0, rope_type="linear", factor=4.0), head_dim=32), {}),
    "llama-yarn": ("llama", shape(64, 2, 2, 2, 96, rope_parameters=rope(
        10000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=64), head_dim=32), {}),
    "llama-yarn-betas": ("llama", shape(64, 2, 1, 2, 96, rope_parameters=rope(
        10000.0, rope_type="yarn", factor=8.0, original_max_position_embeddings=128, beta_fast=16.0, beta_slow=2.0),
                                        head_dim=64), {}),
    "llama-ntk": ("llama", {**shape(64, 4, 2, 2, 96, rope_parameters=rope(
        10000.0, rope_type="dynamic", factor=4.0), head_dim=16), "max_position_embeddings": 64}, {"long": 160}),
    "internlm2": ("internlm2", shape(96, 6, 2, 2, 96, 272, rope_parameters=rope(1000000.0)), {}),
    "qwen2": ("qwen2", shape(96, 6, 2, 2, 96, 272, rope_parameters=rope(1000000.0), tie_word_embeddings=True), {}),
    "qwen3": ("qwen3", shape(64, 4, 2, 2, 96, 320, head_dim=32, rope_parameters=rope(1000000.0),
                             tie_word_embeddings=False), {}),
    "gemma3": ("gemma3", shape(64, 4, 1, 7, 64, 272, head_dim=32, query_pre_attn_scalar=32, sliding_window=16,
                               rope_parameters={"full_attention": rope(1000000.0), "sliding_attention": rope(10000.0)}),
               {}),
    "gemma3-linear-softcap": ("gemma3", shape(
        64, 2, 1, 6, 64, 264, head_dim=64, query_pre_attn_scalar=64, sliding_window=48, final_logit_softcapping=2.0,
        rope_parameters={"full_attention": rope(1000000.0, rope_type="linear", factor=8.0),
                         "sliding_attention": rope(10000.0)}), {}),
    "phi3": ("phi3", shape(64, 4, 4, 2, 96, rope_parameters=rope(10000.0), sliding_window=48), {}),
    "phi3-longrope": ("phi3", {**shape(96, 3, 1, 2, 96, 272, rope_parameters=longrope(10000.0, 32, 64)),
                               "original_max_position_embeddings": 64}, {}),
}
CASES = {"short": 48, "long": 160}  # tokens; 64 lies between, the original context of the scaled models


def text_ids(count, vocab):
    """<|bos|>, then bytes of running text, then every special id once, so that no row of the embedding is unused."""
    text = ("In the beginning the engine read forty pages of prose; it remembered the name of the harbour, the hour of "
            "the tide, the price of 12,345 barrels - and, much later, who had asked. ").encode()
    ids = [256] + list(text * (count // len(text) + 1))
    ids = ids[:count]
    if count > 100:
        special = list(range(257, vocab))[: count // 4]
        ids[count // 2: count // 2 + len(special)] = special
    return ids


def randomize(model, seed):
    """Weights of a realistic spread: scores of a few units, so attention is peaked, and logits of a few units."""
    gen = torch.Generator().manual_seed(seed)
    gemma = isinstance(model, Gemma3ForCausalLM)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=gen, dtype=torch.float32)
            if p.dim() == 1:
                is_norm = name.endswith("norm.weight")
                value = 0.2 * noise + (0.0 if gemma else 1.0) if is_norm else 0.3 * noise
            else:
                gain = 1.5 if any(s in name for s in ("q_proj", "k_proj")) else 1.0
                if "embed_tokens" in name:
                    # Small, or the token itself would win every tied product. Gemma multiplies by sqrt(width).
                    gain = 1.0 if gemma else 0.3 * math.sqrt(p.shape[1])
                value = (gain * noise / math.sqrt(p.shape[1])).half().float()
            p.copy_(value)
    model.tie_weights()


def permute(w, n_head):
    """Rotary halves (transformers) to interleaved pairs (GGUF of the llama families)."""
    return w.reshape(n_head, 2, w.shape[0] // n_head // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def fuse_internlm2(wq, wk, wv, heads, kv, head_dim):
    """InternLM2's `wqkv`: per KV head its query rows, then its key rows, then its value rows."""
    q = wq.reshape(kv, heads // kv, head_dim, -1)
    return np.concatenate([q, wk.reshape(kv, 1, head_dim, -1), wv.reshape(kv, 1, head_dim, -1)], axis=1)


def tensors_of(family, arch, config, model):
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    state = {k: v.numpy() for k, v in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    if family == "internlm2":
        # Through the fused form that such checkpoints have, split as the converter splits it.
        for i in range(config.num_hidden_layers):
            keys = [f"model.layers.{i}.self_attn.{x}_proj.weight" for x in "qkv"]
            fused = fuse_internlm2(*(state[k] for k in keys), heads, kv, head_dim)
            parts = (fused[:, :-2], fused[:, -2], fused[:, -1])
            for key, part in zip(keys, parts):
                state[key] = part.reshape(-1, config.hidden_size)
    for key, value in state.items():
        if family in PERMUTED and ".q_proj." in key:
            value = permute(value, heads)
        if family in PERMUTED and ".k_proj." in key:
            value = permute(value, kv)
        if family == "gemma3" and key.endswith("norm.weight"):
            value = value + np.float32(1.0)
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert name is not None, key
        yield name, value.astype(np.float16 if value.ndim > 1 else np.float32)


def llama3_factors(config):
    p = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    wavelength = 2 * math.pi * p["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = p["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"]), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / p["factor"] + smooth)).astype(np.float32)


def ntk_base(config, seq_len):
    """The base that dynamic NTK scaling uses for a sequence of `seq_len` tokens."""
    p, dim = config.rope_parameters, config.head_dim
    stretch = p["factor"] * seq_len / config.max_position_embeddings - (p["factor"] - 1)
    return p["rope_theta"] * stretch ** (dim / (dim - 2))


def write_rope(writer, family, config, cases):
    params = config.rope_parameters.get("full_attention", config.rope_parameters)
    kind = params.get("rope_type", "default")
    base = params["rope_theta"]
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(params["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(params["factor"])
        writer.add_rope_scaling_orig_ctx_len(params["original_max_position_embeddings"])
        if "beta_fast" in params:
            writer.add_rope_scaling_yarn_beta_fast(params["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(params["beta_slow"])
    elif kind == "longrope":
        original = params["original_max_position_embeddings"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_attn_factors(
            math.sqrt(1 + math.log(config.max_position_embeddings / original) / math.log(original)))
        writer.add_tensor("rope_factors_long.weight", np.array(params["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(params["short_factor"], np.float32))
    elif kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    elif kind == "dynamic":
        base = ntk_base(config, cases["long"])  # GGUF has no key for it: files carry the stretched base
    writer.add_rope_freq_base(base)
    if family == "gemma3":
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def write_vocab(writer, size):
    """One token per byte (GPT-2's printable names), <|bos|>, <|eos|>, a pair of zero bytes, unused ones.

    The pair is there since readers refuse a byte-pair vocabulary without a single merge; text never holds it.
    """
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    spare = iter(range(256, 512))
    tokens = [chr(b) if b in printable else chr(next(spare)) for b in range(256)]
    tokens += ["<|bos|>", "<|eos|>", tokens[0] * 2] + [f"<|unused{i}|>" for i in range(size - 259)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 3, 1] + [5] * (size - 259))
    writer.add_token_merges([f"{tokens[0]} {tokens[0]}"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(True)


def write_gguf(name, family, arch, config, given, model, cases):
    writer = gguf.GGUFWriter(str(golden_io.HERE / f"{name}.gguf"), gguf.MODEL_ARCH_NAMES[arch])
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name("tiny " + name.replace("phi3", "p3"))  # "phi3" in a name makes llama.cpp expect Phi-3's own tokens
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if "head_dim" in given:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if family == "llama":
        writer.add_vocab_size(config.vocab_size)
    if family in ("llama", "phi3"):
        writer.add_rope_dimension_count(head_dim)
    if family == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_sliding_window(config.sliding_window or 0)
    if family == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        if config.final_logit_softcapping:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    write_rope(writer, family, config, cases)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    write_vocab(writer, config.vocab_size)
    for tensor, value in tensors_of(family, arch, config, model):
        writer.add_tensor(tensor, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def build(name, seed):
    family, given, cases = MODELS[name]
    cases = cases or CASES
    config_class, model_class, arch = FAMILIES[family]
    config = config_class(**given, bos_token_id=256, eos_token_id=257, pad_token_id=None)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    randomize(model, seed)
    write_gguf(name, family, arch, config, given, model, cases)
    extra = {"family": family, "seed": seed}
    if config.rope_parameters.get("rope_type") == "dynamic":
        extra["ntk"] = {"base": given["rope_parameters"]["rope_theta"], "factor": given["rope_parameters"]["factor"],
                        "train": config.max_position_embeddings, "tokens": cases["long"]}
    recording = golden_io.Recording(name, f"{name}.gguf", config.vocab_size, **extra)
    with torch.no_grad():
        for case, count in cases.items():
            ids = text_ids(count, config.vocab_size)
            single = model(torch.tensor([ids])).logits[0].numpy()
            double = model.double()(torch.tensor([ids])).logits[0].numpy()
            model.float()
            noise = float(np.linalg.norm(single - double) / np.linalg.norm(double))
            positions = sorted({0, 1, 15, 16, 17, count // 2, count - 2, count - 1})
            # `noise`: float32 against float64 weights and products in transformers itself.
            recording.add_case(case, ids, positions, single, noise=noise)
            print(f"{name:24} {case:6} std of logits {single.std():.2f}  float32 noise {noise:.1e}")
    if name != "llama-ntk":  # its base changes with every token, the file's does not
        recording.add_greedy(golden_io.greedy(model, [text_ids(24, config.vocab_size)], 40))
    recording.write()
    return model


def main():
    golden_io.HERE.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    for seed, name in enumerate(MODELS, start=1):
        if len(sys.argv) == 1 or name in sys.argv[1:]:
            build(name, seed)


if __name__ == "__main__":
    main()
