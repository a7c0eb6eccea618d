#!/usr/bin/env python3
"""eval/opencompass_longkv.py as OpenCompass 0.5.4 calls it, against a stand-in for its base class. Standard library only.

    tests/eval/opencompass_test.py PROGRAM MODEL"""
import inspect
import json
import os
import subprocess
import sys
import types
import unittest

PROGRAM, MODEL = sys.argv[1:3]
TEXT = "In the beginning God created the heaven and the earth. And the earth was without form, and void; "


class BaseModel:
    """What opencompass.models.base.BaseModel does with the methods of a model; templates are plain texts here."""

    def __init__(self, path, max_seq_len=2048, tokenizer_only=False, meta_template=None, generation_kwargs=dict(),
                 sync_rank=False):
        self.path, self.max_seq_len, self.generation_kwargs = path, max_seq_len, generation_kwargs

    def parse_template(self, templates, mode):
        assert mode in ("ppl", "gen")
        return templates

    def get_ppl_from_template(self, templates, mask_length=None):
        return self.get_ppl(self.parse_template(templates, mode="ppl"), mask_length)

    def generate_from_template(self, templates, max_out_len, **kwargs):
        return self.generate(self.parse_template(templates, mode="gen"), max_out_len=max_out_len, **kwargs)

    def get_token_len_from_template(self, templates, mode="ppl"):
        lengths = [self.get_token_len(t) for t in ([templates] if isinstance(templates, str) else templates)]
        return lengths[0] if isinstance(templates, str) else lengths


class Array(list):
    """As much of numpy's arrays as the inferencers use."""

    tolist = lambda self: list(self)
    __sub__ = lambda self, other: Array(a - b for a, b in zip(self, other))


for name in ("opencompass", "opencompass.models", "opencompass.models.base"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["opencompass.models.base"].BaseModel = BaseModel
sys.modules["numpy"] = types.ModuleType("numpy")
sys.modules["numpy"].array = Array
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "eval"))
from opencompass_longkv import Longkv  # noqa: E402


def replies(kv, requests):
    run = subprocess.run([PROGRAM, "score", "-q", "-m", MODEL, "--kv", kv, "-c", "1024"], text=True, check=True,
                         input="".join(json.dumps(r) + "\n" for r in requests), stdout=subprocess.PIPE)
    return [json.loads(line) for line in run.stdout.splitlines()]


class OpenCompass(unittest.TestCase):
    def model(self, kv="full", **more):
        model = Longkv(path=MODEL, kv=kv, max_seq_len=1024, program=PROGRAM, **more)
        self.addCleanup(model.close)
        return model

    def test_answers_are_greedy_and_end_at_stops(self):
        # GenInferencer hands these on to models that name them.
        self.assertLessEqual({"stopping_criteria", "min_out_len"}, set(inspect.signature(Longkv.generate).parameters))
        for kv in ("full", "quest:budget=512"):
            model = self.model(kv)
            wanted = [r["text"] for r in replies(kv, [{"prompt": TEXT, "max_tokens": 12}, {"prompt": "x", "max_tokens": 12}])]
            self.assertEqual(model.generate_from_template([TEXT, "x"], max_out_len=12, stopping_criteria=[], min_out_len=None), wanted)
            stop = wanted[0][3:5]
            cut = model.generate_from_template([TEXT], max_out_len=12, stopping_criteria=[stop])
            self.assertEqual(cut, [wanted[0][:wanted[0].find(stop)]])
            self.assertEqual(model.close(), 0)

    def test_perplexities_choose_as_ppl_inferencer_does(self):
        for kv in ("full", "quest:budget=512"):
            model = self.model(kv)
            texts = [TEXT + "and the earth", TEXT + "zqx kkw jjv z"]
            values = model.get_ppl_from_template(texts).tolist()
            self.assertLess(values[0], values[1])
            for value, r in zip(values, replies(kv, [{"text": t} for t in texts])):
                self.assertAlmostEqual(value, -r["log_likelihood"] / (r["tokens"] + 1), delta=1e-4)
            # With a normalizing_str: the answer after the context, less the answer after that text.
            context, plain, answer = TEXT, "Answer: ", "and the earth"
            lengths = model.get_token_len_from_template([context, plain])
            self.assertEqual(lengths, [len(context) + 1, len(plain) + 1])
            with_context = model.get_ppl_from_template([context + answer], mask_length=lengths[:1])
            alone = model.get_ppl_from_template([plain + answer], mask_length=lengths[1:])
            a, b = replies(kv, [{"prompt": p, "continuation": answer} for p in (context, plain)])
            self.assertAlmostEqual((with_context - alone).tolist()[0],
                                   -a["log_likelihood"] / a["tokens"] + b["log_likelihood"] / b["tokens"], delta=1e-4)

    def test_likelihoods_of_continuations(self):
        model = self.model()
        found = model.get_loglikelihood([TEXT + "the earth", TEXT + "the zqxkk"], ["the earth", "the zqxkk"]).tolist()
        wanted = [r["log_likelihood"] for r in replies("full", [
            {"prompt": TEXT.rstrip(), "continuation": " the " + w} for w in ("earth", "zqxkk")])]
        self.assertGreater(found[0], found[1])
        for f, w in zip(found, wanted):
            self.assertAlmostEqual(f, w, delta=1e-4)
        with self.assertRaises(ValueError):
            model.get_loglikelihood(["abc"], ["d"])

    def test_what_cannot_be_answered_says_why(self):
        model = self.model()
        with self.assertRaisesRegex(RuntimeError, "do not fit the context of 1024"):
            model.generate(["x" * 2000], 4)
        self.assertEqual(len(model.generate(["x"], 4)), 1)  # the process goes on
        with self.assertRaises(NotImplementedError):
            model.generate(["x"], 4, min_out_len=2)
        with self.assertRaises(NotImplementedError):
            self.model(generation_kwargs={"do_sample": True, "temperature": 0.7})
        broken = self.model("no_such_recipe")
        with self.assertRaisesRegex(RuntimeError, "exit code"):
            broken.generate(["x"], 4)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
