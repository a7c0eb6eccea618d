"""Writes the recorded answers that the C++ tests read (tests/support/golden.h).

NAME.json describes the recording, NAME.bin holds its rows: for every (case, position) in order, the logits of
`columns` (all columns when that list is empty) as little-endian float32.
"""
import json
import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).resolve().parent / "models"


def versions():
    return {"torch": torch.__version__, "transformers": transformers.__version__}


class Recording:
    def __init__(self, name, model, vocab, columns=None, **extra):
        self.name = name
        self.columns = columns
        self.rows = []
        self.meta = {
            "format": 1,
            "model": model,
            "vocab": vocab,
            "columns": columns if columns is not None else [],
            "versions": versions(),
            **extra,
            "cases": [],
        }

    def add_case(self, name, ids, positions, logits, **extra):
        """`logits` is float32 [len(ids), vocab]; the rows at `positions` are kept."""
        kept = logits[positions].astype(np.float32)
        wide = kept.astype(np.float64)
        top = wide.max(axis=1)
        lse = top + np.log(np.exp(wide - top[:, None]).sum(axis=1))
        order = np.argsort(-kept, axis=1, kind="stable")[:, :2]
        self.meta["cases"].append({
            "name": name,
            "ids": [int(i) for i in ids],
            "positions": [int(p) for p in positions],
            "norms": [float(n) for n in np.linalg.norm(wide, axis=1)],
            "lse": [float(v) for v in lse],
            "top": [int(i) for i in order[:, 0]],
            "gap": [float(kept[r, o[0]] - kept[r, o[1]]) for r, o in enumerate(order)],
            **extra,
        })
        self.rows.append(kept if self.columns is None else kept[:, self.columns])

    def add_greedy(self, prompts):
        """`prompts`: list of {"prompt": ids, "continuation": ids, "gap": top-1 minus top-2 logit of every step}."""
        self.meta["greedy"] = prompts

    def write(self):
        HERE.mkdir(exist_ok=True)
        text = json.dumps(self.meta, separators=(",", ":"), ensure_ascii=False)
        (HERE / f"{self.name}.json").write_text(text + "\n", encoding="utf-8")
        np.concatenate(self.rows).astype("<f4").tofile(HERE / f"{self.name}.bin")


def greedy(model, prompt, steps):
    """Greedy text with the cache in use, and how clear every choice was."""
    ids, gaps = [], []
    with torch.no_grad():
        out = model(torch.tensor([prompt]), use_cache=True)
        for _ in range(steps):
            two = torch.topk(out.logits[0, -1], 2)
            ids.append(int(two.indices[0]))
            gaps.append(round(float(two.values[0] - two.values[1]), 6))
            out = model(torch.tensor([[ids[-1]]]), past_key_values=out.past_key_values, use_cache=True)
    return {"prompt": [int(i) for i in prompt], "continuation": ids, "gap": gaps}
