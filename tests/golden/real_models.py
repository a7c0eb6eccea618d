#!/usr/bin/env python3
"""Records what Hugging Face transformers computes with the real GGUF files: logits and greedy text in float32.

transformers decodes every weight to float32 and uses eager attention, so this is the truth for products in float32
with a float32 cache. Of a row of a large vocabulary only a fixed sample of columns is kept, with the norm and the
log-sum-exp of the whole row. Prompts become ids through llama.cpp's llama-tokenize, without BOS, except those of
needle-10m-128k (bytes after BOS).

Usage: python real_models.py MODEL_DIRECTORY LLAMA_CPP_BIN_DIRECTORY [NAME...]     (packages: requirements.txt)
"""
import ast
import pathlib
import subprocess
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM

import golden_io

ROOT = pathlib.Path(__file__).resolve().parents[2]

STORY = """The keeper of the light at Saint Anselm had three duties and one pleasure. He trimmed the wick at dusk, he wrote
the weather in a ruled book at midnight, and at dawn he counted the boats that went out, so that somebody would know if
fewer came back. The pleasure was the piano. Nobody on the coast could say how a piano had been carried up two hundred
and eleven steps, and the keeper, when asked, said only that it had been lighter in those days. On the ninth of March the
book says: wind north by west, sea rough, all boats in but one. On the tenth it says nothing at all, and the page is
wrinkled as if it had been wet. On the eleventh, in another hand, it says: light relit at four; boat found; keeper
playing. When the inspectors came in summer they read the three pages, and looked at one another, and then the younger
one asked what had happened on the tenth. The keeper thought for a while. Then he"""

TEXT_PROMPTS = [
    "Once upon a time, in a village at the edge of a forest, there lived a clockmaker who",
    "<|im_start|>user\nWhat is the capital of France, and what is it known for?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nExplain in three sentences why the sky is blue.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "The three laws of motion are as follows. First,",
    "1, 2, 4, 8, 16, 32,",
    "<|im_start|>user\nWrite a short letter to a landlord about a broken heater.<|im_end|>\n<|im_start|>assistant\n",
    "Ingredients for a simple bread:\n- 500 g flour\n- ",
    "Die Hauptstadt von Deutschland ist Berlin. Die Stadt",
    "Q: A train leaves at 9:40 and arrives at 12:05. How long does the journey take?\nA:",
]

HAY = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE_PROMPTS = [
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it.\n" + HAY * 6 +
    "The pass key is 71432. Remember it. 71432 is the pass key. " + HAY * 6 +
    "\nWhat is the pass key? The pass key is",
    "Extract the value of the specified key from the JSON object below.\n\nJSON data:\n{\"3f2a9c01\": \"b7e4d210\", "
    "\"91cc04ab\": \"0d5f6e72\", \"7a7be3f9\": \"c2810446\"}\n\nKey: \"91cc04ab\"\nThe value of the specified key is: \"",
    "Memorize and track the chains of variable assignment hidden in the following text.\n" + HAY * 2 +
    " VAR ABCDE = 12345. " + HAY * 2 + " VAR FGHIJ = VAR ABCDE. " + HAY +
    "\nWhat is the value of VAR FGHIJ? VAR FGHIJ =",
    "Some special magic numbers are hidden within the following text. Memorize them.\n" + HAY * 3 +
    " One of the special magic numbers for amber-anchor is: 4820193. " + HAY * 3 +
    "\nWhat is the special magic number for amber-anchor mentioned in the provided text? The special magic number for "
    "amber-anchor mentioned in the provided text is",
    "In the beginning God created the heaven and the earth. And the earth was",
    "And it came to pass in those days, that",
    "The package can be configured by editing the file /etc/",
    "DESCRIPTION\n       This program reads its standard input and",
    "To install the package from source, first",
    "Copyright (C) 2004 Free Software Foundation, Inc.\n\nThis program is free software;",
]


def text_ids(binary, model, text):
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        run = subprocess.run([binary / "llama-tokenize", "-m", model, "-f", file.name, "--ids", "--no-bos"],
                             capture_output=True, text=True, check=True)
    return ast.literal_eval(run.stdout.strip().splitlines()[-1])


def load(path):
    return AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32,
                                                attn_implementation="eager").eval()


def record(name, path, vocab_step, case_ids, prompts, steps, positions):
    model = load(path)
    vocab = model.get_input_embeddings().weight.shape[0]
    columns = list(range(0, vocab, vocab_step)) if vocab_step > 1 else None
    out = golden_io.Recording(name, path.name, vocab, columns, family=model.config.model_type.replace("_text", ""))
    with torch.no_grad():
        out.add_case("long", case_ids, positions, model(torch.tensor([case_ids])).logits[0].numpy())
    texts = golden_io.greedy(model, prompts, steps)
    print(name, "smallest gaps of the texts:", " ".join(f"{min(t['gap']):.1e}" for t in texts), flush=True)
    out.add_greedy(texts)
    out.write()


def main():
    models, binary = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    wanted = sys.argv[3:] or ["smollm2-q4_1", "gemma3-270m-q4_k_m", "needle-10m-128k"]
    positions = [0, 1, 31, 63, 64, 100, 150, 198, 199]
    if "smollm2-q4_1" in wanted:
        path = models / "SmolLM2-135M-Instruct.Q4_1.gguf"
        ids = text_ids(binary, path, STORY)[:200]
        assert len(ids) == 200, len(ids)
        record("smollm2-q4_1", path, 48, ids, [text_ids(binary, path, p) for p in TEXT_PROMPTS], 200, positions)
    if "gemma3-270m-q4_k_m" in wanted:
        path = models / "gemma-3-270m-q4_k_m.gguf"
        ids = [2] + text_ids(binary, path, STORY)[:199]
        prompts = [[2] + text_ids(binary, path, TEXT_PROMPTS[i]) for i in (0, 4, 8)]
        record("gemma3-270m-q4_k_m", path, 256, ids, prompts, 60, positions)
    if "needle-10m-128k" in wanted:
        path = ROOT / "models" / "needle-10m-128k-f16.gguf"
        prompts = [[256] + list(p.encode()) for p in NEEDLE_PROMPTS]
        record("needle-10m-128k", path, 1, [256] + list(STORY.encode())[:199], prompts, 200, positions)


if __name__ == "__main__":
    main()
