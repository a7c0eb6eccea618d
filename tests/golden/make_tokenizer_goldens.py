#!/usr/bin/env python3
"""Records ids of Hugging Face `tokenizers` and prompts of the models' own chat templates (see requirements.txt).

Usage: make_tokenizer_goldens.py SMOLLM2.gguf GEMMA3.gguf TEMPLATE_DIRECTORY
Writes tokenizer_smollm2.json, tokenizer_gemma3.json and chat_prompts.json beside itself.
The tokenizers are built here from the vocabulary in the GGUF file and the published pipeline of the model.
TEMPLATE_DIRECTORY holds Jinja templates as llama.cpp keeps them in models/templates; only rendered prompts are stored.
"""
import json
import pathlib
import random
import sys

import jinja2
from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

HERE = pathlib.Path(__file__).parent

STRINGS = [
    "", " ", "  ", "   ", "\n", "\n\n", "\n\n\n\n\n", "\t", "\t\t x", "\r\n", "\r\n\r\n a", "Hello world", " Hello world",
    "Hello, world!", "  leading", "trailing  ", "a  b   c    d", "1234567", "3.14159", "12 345 6789", "!!!???", "a.b,c",
    "\nA.\n\n### B\n", "Hello world! Caf\u00e9 d\u00e9j\u00e0 vu - 123 \U0001f600", "This is \U0001f999.cpp",
    "I'm you're he'll we've I'd it's 'S 'LL don't", "'\u017f x", "caf\u0065\u0301 a\u0301\u0301\u0301", "a\u200db\ufeffc",
    "\ufeffBOM first", "nul \x00 inside\x00", "\x7f\x80\x9f", "\u0085next\u00a0line\u2003em\u3000ideo", "\u2028\u2029",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3067\u3059\u3002", "\u4f60\u597d\uff0c\u4e16\u754c\uff01", "\ud55c\uad6d\uc5b4 \ubb38\uc7a5",
    "\u0420\u0443\u0441\u0441\u043a\u0438\u0439 \u0442\u0435\u043a\u0441\u0442", "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0661\u0662\u0663",
    "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22", "\u1780\u17b6\u1793\u17cb\u178f\u17c2", "\u0928\u092e\u0938\u094d\u0924\u0947 \u0967\u0968\u0969",
    "\u2160\u2161\u2162 \u00bd \u00b2\u00b3 \u2460\u2461", "\U0001d400\U0001d7ce\U0001d7cf", "\U0001f469\u200d\U0001f469\u200d\U0001f467 family",
    "\U0001f1e9\U0001f1ea flags", "def f(x):\n    return x + 1  # ok\n", "<html><body>x</body></html>", "<a></a> <br>", "https://example.org/a?b=c&d=%20",
    "{\"key\": [1, 2, 3]}", "$100 + 50% = ~150 ^ `q` | <=> @", "\u2581under\u2581\u2581line", "word\u2581word", "__init__ snake_case CamelCase",
    "usus" * 20, "Z" * 200, " " * 100, "=" * 77, "a\u0301" * 40, "\u4e2d" * 50, "ab " * 60, "\n \n \n  \n", "x\n\n  y\n\n\n   z",
    "<unused5> <0x41> [multimodal]", "tab\tsep\tvalue\n", "\u00c0\u00c1\u00c2 \u01c5 \u02b0\u02b1 \u00aa\u00ba", "0" * 31, "-1 +2 *3 /4",
]


def random_strings(count):
    """Mixtures of classes, with a fixed seed."""
    pool = ["a", "B", "z", "the", " ", "  ", "\n", "\t", "1", "23", "'", "'s", "'ll", ".", ",", "!", "\u00e9", "\u0301", "\u4e2d", "\U0001f600", "\u00a0", "\u3000", "\u0661", "_", "<", ">", "\r\n", "Q", "\u0436", "\u2581"]
    rng = random.Random(20240601)
    return ["".join(rng.choice(pool) for _ in range(rng.randint(1, 40))) for _ in range(count)]


def field(reader, name):
    return reader.fields["tokenizer.ggml." + name].contents()


def smollm2(path):
    reader = GGUFReader(path)
    tokens = field(reader, "tokens")
    merges = [tuple(m.split(" ")) for m in field(reader, "merges")]
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tok.decoder = decoders.ByteLevel()
    return tok


def gemma3(path):
    reader = GGUFReader(path)
    tokens, scores, types = (field(reader, n) for n in ("tokens", "scores", "token_type"))
    # A token is a merge of two tokens; the better the score of the result, the earlier the merge.
    ids = {t: i for i, t in enumerate(tokens)}
    merges = []
    for i, token in enumerate(tokens):
        if types[i] not in (1, 4):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids and types[ids[left]] in (1, 4) and types[ids[right]] in (1, 4):
                merges.append((-scores[i], i, cut, left, right))
    merges.sort()
    tok = Tokenizer(
        models.BPE(vocab=ids, merges=[(m[3], m[4]) for m in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tok.normalizer = normalizers.Replace(" ", "\u2581")
    tok.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tok.add_tokens([AddedToken(t, normalized=False) for i, t in enumerate(tokens) if types[i] == 4])
    return tok


def record(name, source, tok, strings):
    rows = [[s, tok.encode(s, add_special_tokens=False).ids] for s in strings]
    out = {"source": source, "cases": rows}
    (HERE / f"tokenizer_{name}.json").write_text(json.dumps(out, ensure_ascii=True, separators=(",", ":")) + "\n")


CONVERSATIONS = [
    [("user", "Hello")],
    [("system", "Be brief."), ("user", "What is 2+2?")],
    [("user", "  padded  "), ("assistant", "An answer."), ("user", "And\nmore?")],
    [("user", "\n\nline breaks first"), ("assistant", " spaced "), ("user", "\ttab "), ("assistant", "ok"), ("user", "last")],
]


def chat_prompts(smollm2_path, directory):
    read = lambda name: (pathlib.Path(directory) / name).read_text()
    templates = {
        "smollm2": GGUFReader(smollm2_path).fields["tokenizer.chat_template"].contents(),
        "gemma": read("google-gemma-2-2b-it.jinja"),
        "phi3": read("microsoft-Phi-3.5-mini-instruct.jinja"),
        "llama3": read("meta-llama-Llama-3.1-8B-Instruct.jinja"),
        "mistral": read("mistralai-Mistral-Nemo-Instruct-2407.jinja"),
        "qwen2.5": read("Qwen-Qwen2.5-7B-Instruct.jinja"),
    }
    env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])

    def refuse(message):
        raise jinja2.TemplateError(message)

    env.globals["raise_exception"] = refuse
    out = {}
    for name, text in templates.items():
        template = env.from_string(text)
        rows = []
        for conversation in CONVERSATIONS:
            messages = [{"role": r, "content": c} for r, c in conversation]
            for generate in (True, False):
                try:
                    prompt = template.render(
                        messages=messages, add_generation_prompt=generate, bos_token="<|bos|>", eos_token="<|eos|>", tools=None
                    )
                except jinja2.TemplateError:
                    prompt = None  # the template refuses this conversation
                rows.append({"messages": messages, "generate": generate, "prompt": prompt})
        out[name] = rows
    (HERE / "chat_prompts.json").write_text(json.dumps(out, ensure_ascii=True, indent=1) + "\n")


def main():
    smollm2_path, gemma3_path, directory = sys.argv[1:4]
    strings = STRINGS + random_strings(150)
    record("smollm2", "SmolLM2-135M-Instruct, tokenizers BPE", smollm2(smollm2_path), strings)
    record("gemma3", "gemma-3-270m, tokenizers BPE", gemma3(gemma3_path), strings)
    chat_prompts(smollm2_path, directory)


if __name__ == "__main__":
    main()
