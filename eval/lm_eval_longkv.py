#!/usr/bin/env python3
"""Runs tasks of EleutherAI's lm-evaluation-harness (package lm-eval) with longkv under any KV recipe.

    eval/lm_eval_longkv.py -m MODEL.gguf --kv quest:budget=1024 --tasks hellaswag --limit 50
    eval/lm_eval_longkv.py -m MODEL.gguf --include-path FOLDER --tasks my_task --output results.json

One `longkv score` process answers all requests as lines of JSON (docs/evaluation.md). Nothing is cut: a request that
does not fit the context ends the run with its reason. Chat templates are not applied. Needs `pip install lm-eval`."""
import argparse
import json
import sys

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from longkv_score import PROGRAM, Score


class Longkv(LM):
    """Requests of the harness, answered by one process in the order in which they come."""

    def __init__(self, program, model, kv, context, threads, more):
        super().__init__()
        self.score = Score(program, model, kv, context, threads, more)

    def close(self):
        return self.score.close()

    def loglikelihood(self, requests):
        out = []
        for r in requests:
            context, continuation = r.args
            # As the harness's own models: blanks at the end of the context belong to the continuation's first token.
            kept = context.rstrip()
            reply = self.score.ask({"prompt": kept, "continuation": context[len(kept):] + continuation})
            out.append((reply["log_likelihood"], reply["greedy"]))
        return out

    def loglikelihood_rolling(self, requests):
        return [self.score.ask({"text": r.args[0]})["log_likelihood"] for r in requests]

    def generate_until(self, requests):
        out = []
        for r in requests:
            context, how = r.args
            if how.get("do_sample") and how.get("temperature", 1) > 0:
                raise NotImplementedError("longkv score answers greedily; set do_sample: false")
            stops = how.get("until") or []
            reply = self.score.ask({"prompt": context, "max_tokens": int(how.get("max_gen_toks", 256)),
                              "stop": [stops] if isinstance(stops, str) else list(stops)})
            out.append(reply["text"])
        return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model", required=True, help="GGUF file")
    parser.add_argument("--kv", default="full", help="KV recipe")
    parser.add_argument("--tasks", required=True, help="comma separated")
    parser.add_argument("--include-path", help="folder of own task files (YAML)")
    parser.add_argument("--num-fewshot", type=int)
    parser.add_argument("--limit", type=float, help="samples of each task; for trying out only")
    parser.add_argument("-c", "--context", help="tokens, K and M allowed")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--output", help="results as JSON")
    parser.add_argument("--longkv", default=PROGRAM, help="the program")
    parser.add_argument("more", nargs="*", help="further options of longkv score, after --")
    o = parser.parse_args()
    lm = Longkv(o.longkv, o.model, o.kv, o.context, o.threads, o.more)
    results = simple_evaluate(model=lm, tasks=o.tasks.split(","), num_fewshot=o.num_fewshot, limit=o.limit,
                              task_manager=TaskManager(include_path=o.include_path), bootstrap_iters=0)
    code = lm.close()
    if code != 0:
        sys.exit(f"longkv ended with exit code {code}")
    for task, values in results["results"].items():
        for name, value in values.items():
            if isinstance(value, float):
                print(f"{task}  {name}  {value:.6g}")
    if o.output:
        with open(o.output, "w") as f:
            json.dump({"results": results["results"], "kv": o.kv, "model": o.model}, f, indent=1, default=str)


if __name__ == "__main__":
    main()
