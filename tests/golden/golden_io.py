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


def greedy(model, prompts, steps):
    """Greedy text of several prompts, and how clear every choice was.

    The texts are found together, left-padded to one length, with a cache. The choices and gaps recorded are those of
    one plain forward pass over each whole text, without padding; where the two disagree the recording is refused.
    """
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    chosen = []
    with torch.no_grad():
        out = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), use_cache=True)
        for _ in range(steps):
            chosen.append(out.logits[:, -1].argmax(-1))
            mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=mask.dtype)], dim=1)
            out = model(chosen[-1][:, None], attention_mask=mask, position_ids=mask.sum(-1, keepdim=True) - 1,
                        past_key_values=out.past_key_values, use_cache=True)
    texts = []
    for row, prompt in enumerate(prompts):
        continuation = [int(c[row]) for c in chosen]
        with torch.no_grad():
            logits = model(torch.tensor([list(prompt) + continuation])).logits[0, len(prompt) - 1:-1]
        two = torch.topk(logits, 2, dim=-1)
        if two.indices[:, 0].tolist() != continuation:
            raise SystemExit(f"prompt {row}: padded and plain computation choose different tokens")
        gaps = [round(float(g), 6) for g in (two.values[:, 0] - two.values[:, 1])]
        texts.append({"prompt": [int(i) for i in prompt], "continuation": continuation, "gap": gaps})
    return texts
