"""A model of OpenCompass (package opencompass) that is longkv under any KV recipe. In a configuration of its:

    import sys
    sys.path.insert(0, '.../longkv/eval')
    from opencompass_longkv import Longkv
    models = [dict(type=Longkv, abbr='quest-1024', path='MODEL.gguf', kv='quest:budget=1024', max_seq_len=32768,
                   max_out_len=128, batch_size=1, run_cfg=dict(num_gpus=0))]

One `longkv score` process answers all requests as lines of JSON (docs/evaluation.md), greedily. Nothing is cut: a request
that does not fit max_seq_len ends the run with its reason, where OpenCompass's own models shorten it. Chat formats are what
`meta_template` says, as for every model there."""
import numpy as np
from longkv_score import Score
from opencompass.models.base import BaseModel


class Longkv(BaseModel):
    def __init__(self, path, kv="full", max_seq_len=2048, tokenizer_only=False, meta_template=None,
                 generation_kwargs=None, threads=None, options=(), program=None):
        super().__init__(path=path, max_seq_len=max_seq_len, tokenizer_only=tokenizer_only, meta_template=meta_template,
                         generation_kwargs=generation_kwargs or {})
        how = self.generation_kwargs
        if how.get("do_sample") and how.get("temperature", 1) > 0:
            raise NotImplementedError("longkv score answers greedily; leave do_sample out")
        self.score = Score(program, path, kv, max_seq_len, threads, options)

    def close(self):
        return self.score.close()

    def generate(self, inputs, max_out_len, min_out_len=None, stopping_criteria=(), **more):
        if min_out_len:
            raise NotImplementedError("longkv score has no least length of an answer; leave min_out_len out")
        stops = [stopping_criteria] if isinstance(stopping_criteria, str) else list(stopping_criteria)
        n = int(max_out_len or self.generation_kwargs.get("max_new_tokens", 512))
        return [self.score.ask({"prompt": text, "max_tokens": n, "stop": stops})["text"] for text in inputs]

    def get_ppl(self, inputs, mask_length=None):
        """Nats a token, by the count that OpenCompass's models divide by: of all tokens, of which the first is given, or of
        those behind `mask_length`."""
        out = []
        for i, text in enumerate(inputs):
            skip = int(mask_length[i]) if mask_length is not None else 1
            reply = self.score.ask({"text": text, "skip": skip})
            out.append(-reply["log_likelihood"] / (reply["tokens"] + (mask_length is None)))
        return np.array(out)

    def get_loglikelihood(self, inputs, conts):
        """Of what stands in each input from its continuation on. Blanks before it belong to its first token."""
        out = []
        for text, continuation in zip(inputs, conts):
            at = text.rfind(continuation)
            if at < 0:
                raise ValueError(f"the input does not hold its continuation {continuation!r}")
            kept = text[:at].rstrip()
            out.append(self.score.ask({"prompt": kept, "continuation": text[len(kept):]})["log_likelihood"])
        return np.array(out)

    def get_token_len(self, prompt):
        return self.score.ask({"count": str(prompt)})["tokens"]
